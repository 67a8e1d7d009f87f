// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row of scores. Everything is in base 2.
#pragma once

#include "vec.h"

namespace choreo::CHOREO_ISA {

constexpr float kMasked = -__builtin_inff();
// Maximum of a row that has seen no key yet: finite, so that differences are never NaN.
constexpr float kNoMaximum = -1e30f;

// Changes to a score beyond the scaled dot product.
struct ScoreRule {
  float cap;  // softcap * log2(e) * inverse_temperature, or 0; scores then come divided by softcap
  bool has_alibi;
  float inverse_temperature;  // one over the temperature; scores without a cap have it already
};

// Finishes the scores of one row in one piece, in place, and returns their maximum so far.
// Columns outside [first, last) become kMasked. `slope` * (column + `distance`) is ALiBi's term.
static CHOREO_INLINE Vec finish_scores(float* scores, int num_columns, int first, int last,
                                       const ScoreRule& rule, float slope, float distance,
                                       Vec maximum) {
  if (rule.cap == 0.0f && !rule.has_alibi && first == 0 && last == num_columns) {
    for (int c = 0; c < num_columns; c += kWidth) maximum = max(load(scores + c), maximum);
    return maximum;
  }
  const Vec lane = iota();
  for (int c = 0; c < num_columns; c += kWidth) {
    Vec s = load(scores + c);
    const Vec column = lane + static_cast<float>(c);
    if (rule.cap != 0.0f) s = tanh(s) * rule.cap;
    if (rule.has_alibi) s += (column + distance) * slope;
    s = column >= broadcast(static_cast<float>(first)) ? s : broadcast(kMasked);
    s = column < broadcast(static_cast<float>(last)) ? s : broadcast(kMasked);
    store(scores + c, s);
    maximum = max(s, maximum);
  }
  return maximum;
}

// scores = 2^(scores - maximum); returns sum plus the new terms.
static CHOREO_INLINE Vec exponentiate(float* scores, int num_columns, float maximum, Vec sum) {
  for (int c = 0; c < num_columns; c += kWidth) {
    const Vec p = exp2(load(scores + c) - maximum);
    store(scores + c, p);
    sum += p;
  }
  return sum;
}

}  // namespace choreo::CHOREO_ISA

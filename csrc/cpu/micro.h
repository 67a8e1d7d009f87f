// SPDX-License-Identifier: Apache-2.0
// Register-blocked products: scores = Q K and out = out * alpha + P V, for a few rows at a time.
#pragma once

#include "vec.h"

namespace choreo::CHOREO_ISA {

// Rows that share one pass over keys or values, and vectors per row held in registers.
// kMaxRows * kVecs accumulators, kVecs loaded vectors and one broadcast fit the register file.
constexpr int kMaxRows = CHOREO_MAX_ROWS;
constexpr int kVecs = 2;
// With few rows (decode) more vectors per row keep enough multiply-adds in flight.
constexpr int kWideVecs = 4;
constexpr int kWideMaxRows = kMaxRows * kVecs / kWideVecs;

// Elements in a cache line.
template <typename T>
constexpr int kLine = 64 / sizeof(T);

// Sums kept apart over the head, so that enough multiply-adds are in flight (latency 4, two per cycle).
constexpr int score_sets(int accumulators) {
  return accumulators >= 16 ? 1 : accumulators >= 8 ? 2 : 4;
}

// scores[r][0 .. NV * kWidth) = sum over d of query[d][r] * keys[d][...].
// query: packed [head_size, kMaxRows]; keys: [head_size, block_size], first column of interest.
// The values of the block, which follow its keys, are fetched ahead. 4000 tokens, 32 / 8 heads of
// size 128, Zen 5: 0.61 of the time for one request, 0.7 for 16 that read together.
template <int R, int NV, typename T>
static CHOREO_INLINE void score_block(const float* query, const T* keys, int head_size,
                                      int block_size, float* scores, int scores_stride) {
  constexpr int kSets = score_sets(R * NV);
  const T* values = keys + static_cast<int64_t>(head_size) * block_size;
  Vec acc[kSets][R][NV] = {};
  for (int d = 0; d < head_size; d += kSets) {
#pragma GCC unroll 4
    for (int s = 0; s < kSets; ++s) {
      Vec k[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) k[n] = load(keys + n * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec q = broadcast(query[r]);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[s][r][n] += q * k[n];
      }
#pragma GCC unroll 8
      for (int c = 0; c < NV * kWidth; c += kLine<T>) __builtin_prefetch(values + c, 0, 3);
      values += block_size;
      query += kMaxRows;
      keys += block_size;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
#pragma GCC unroll 4
      for (int s = 1; s < kSets; ++s) acc[0][r][n] += acc[s][r][n];
      store(scores + r * scores_stride + n * kWidth, acc[0][r][n]);
    }
  }
}

// Scores of R rows against num_columns slots (a multiple of kColumnStep).
template <int R, typename T>
static CHOREO_INLINE void score_columns(const float* query, const T* keys, int head_size,
                                        int block_size, int num_columns, float* scores,
                                        int scores_stride) {
  int c = 0;
  if constexpr (R <= kWideMaxRows) {
    for (; c + kWideVecs * kWidth <= num_columns; c += kWideVecs * kWidth) {
      score_block<R, kWideVecs>(query, keys + c, head_size, block_size, scores + c, scores_stride);
    }
  }
  for (; c + kVecs * kWidth <= num_columns; c += kVecs * kWidth) {
    score_block<R, kVecs>(query, keys + c, head_size, block_size, scores + c, scores_stride);
  }
  for (; c < num_columns; c += kWidth) {
    score_block<R, 1>(query, keys + c, head_size, block_size, scores + c, scores_stride);
  }
}

// Values that one block of a chunk contributes: [num_tokens, value_size], value_stride apart, and
// the column of the first one in the matrix of probabilities.
template <typename T>
struct ValueRun {
  const T* values;
  const T* ahead;  // keys of the next chunk, as many bytes as the values, to be fetched ahead
  int column;
  int num_tokens;
};

// out[r][0 .. NV * kWidth) = out * alpha[r] + sum over tokens of probs[r][token] * values[token].
template <int R, int NV, typename T>
static CHOREO_INLINE void value_block(const float* probs, int probs_stride, const float* alpha,
                                      const ValueRun<T>* runs, int num_runs, int value_size,
                                      int value_stride, int dim, float* out) {
  Vec acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      acc[r][n] = load(out + r * value_size + dim + n * kWidth) * alpha[r];
    }
  }
  for (int i = 0; i < num_runs; ++i) {
    const T* v = runs[i].values + dim;
    const T* ahead = runs[i].ahead + dim;
    const float* p = probs + runs[i].column;
    for (int k = 0; k < runs[i].num_tokens; ++k) {
      Vec value[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) value[n] = load(v + n * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec weight = broadcast(p[r * probs_stride + k]);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] += weight * value[n];
      }
#pragma GCC unroll 8
      for (int c = 0; c < NV * kWidth; c += kLine<T>) __builtin_prefetch(ahead + c, 0, 3);
      ahead += value_stride;
      v += value_stride;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(out + r * value_size + dim + n * kWidth, acc[r][n]);
  }
}

// The same for whole rows of value_size (a multiple of kColumnStep).
template <int R, typename T>
static CHOREO_INLINE void value_rows(const float* probs, int probs_stride, const float* alpha,
                                     const ValueRun<T>* runs, int num_runs, int value_size,
                                     int value_stride, float* out) {
  int d = 0;
  if constexpr (R <= kWideMaxRows) {
    for (; d + kWideVecs * kWidth <= value_size; d += kWideVecs * kWidth) {
      value_block<R, kWideVecs>(probs, probs_stride, alpha, runs, num_runs, value_size,
                                value_stride, d, out);
    }
  }
  for (; d + kVecs * kWidth <= value_size; d += kVecs * kWidth) {
    value_block<R, kVecs>(probs, probs_stride, alpha, runs, num_runs, value_size, value_stride, d,
                          out);
  }
  for (; d < value_size; d += kWidth) {
    value_block<R, 1>(probs, probs_stride, alpha, runs, num_runs, value_size, value_stride, d, out);
  }
}

}  // namespace choreo::CHOREO_ISA

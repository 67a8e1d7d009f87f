// SPDX-License-Identifier: Apache-2.0
// Packs the queries of a tile for the micro-kernels and rotates them.
//
// Packed layout: [num_groups, head_size, kMaxRows], so that one step over the head reads kMaxRows
// neighbouring floats. Rows as in Member; those of no member are never read.
#pragma once

#include "kernels.h"
#include "micro.h"

namespace choreo::CHOREO_ISA {

static CHOREO_INLINE int round_up_rows(int rows) {
  return (rows + kMaxRows - 1) / kMaxRows * kMaxRows;
}

// The rows of one member.
template <typename T>
static void pack_queries(const AttentionArgs& a, int kv_head, const Member& member, float factor,
                         float* packed) {
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const int head_size = a.cache.head_size;
  const int64_t first = a.query_start_loc[member.req] + member.query_begin;
  for (int i = 0; i < member.num_queries * group_heads; ++i) {
    const int row = member.first_row + i;
    float* out = packed + static_cast<int64_t>(row / kMaxRows) * head_size * kMaxRows;
    const T* query = static_cast<const T*>(a.query) +
                     (first + i / group_heads) * a.query_token_stride +
                     (kv_head * group_heads + i % group_heads) * a.query_head_stride;
    for (int d = 0; d < head_size; ++d)
      out[d * kMaxRows + row % kMaxRows] = to_float(query[d]) * factor;
  }
}

// Dims [first_dim, end_dim) of rows [begin, end) of one group: target = packed.
static CHOREO_INLINE void copy_dims(const float* packed, int begin, int end, int first_dim,
                                    int end_dim, float* target) {
  for (int d = first_dim; d < end_dim; ++d) {
    for (int r = begin; r < end; ++r) target[d * kMaxRows + r] = packed[d * kMaxRows + r];
  }
}

// Rows [begin, end) of one group: target = packed, rotary_dim dims from `offset` on rotated by
// cos_sin.
static CHOREO_INLINE void rotate_group(const float* packed, int begin, int end, int head_size,
                                       int offset, const float* cos_sin, int rotary_dim,
                                       bool is_neox, float* target) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const int first = (offset + (is_neox ? i : 2 * i)) * kMaxRows;
    const int second = (offset + (is_neox ? i + half : 2 * i + 1)) * kMaxRows;
    const float cos = cos_sin[i];
    const float sin = cos_sin[half + i];
    for (int r = begin; r < end; ++r) {
      const float x = packed[first + r];
      const float y = packed[second + r];
      target[first + r] = x * cos - y * sin;
      target[second + r] = y * cos + x * sin;
    }
  }
  copy_dims(packed, begin, end, 0, offset, target);
  copy_dims(packed, begin, end, offset + rotary_dim, head_size, target);
}

// Rotates `num_rows` rows from `first_row` on; cos_sin [rotary_dim], or rotary_dim 0 to copy.
static void rotate_rows(const float* packed, int first_row, int num_rows, int head_size,
                        int rotary_offset, const float* cos_sin, int rotary_dim, bool is_neox,
                        float* target) {
  const int last_row = first_row + num_rows;
  for (int g = first_row / kMaxRows; g * kMaxRows < last_row; ++g) {
    const int64_t at = static_cast<int64_t>(g) * head_size * kMaxRows;
    const int begin = first_row > g * kMaxRows ? first_row - g * kMaxRows : 0;
    const int end = last_row - g * kMaxRows;
    if (begin == 0 && end >= kMaxRows) {  // the compiler unrolls what it knows
      rotate_group(packed + at, 0, kMaxRows, head_size, rotary_offset, cos_sin, rotary_dim, is_neox,
                   target + at);
    } else {
      rotate_group(packed + at, begin, end < kMaxRows ? end : kMaxRows, head_size, rotary_offset,
                   cos_sin, rotary_dim, is_neox, target + at);
    }
  }
}

}  // namespace choreo::CHOREO_ISA

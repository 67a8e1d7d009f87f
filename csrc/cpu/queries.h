// SPDX-License-Identifier: Apache-2.0
// Packs the queries of a tile for the micro-kernels and rotates them.
//
// Packed layout: [num_groups, head_size, kMaxRows], so that one step over the head reads kMaxRows
// neighbouring floats. Row = query * heads per KV head + head; absent rows are zero.
#pragma once

#include "kernels.h"
#include "micro.h"

namespace choreo::CHOREO_ISA {

static CHOREO_INLINE int round_up_rows(int rows) {
  return (rows + kMaxRows - 1) / kMaxRows * kMaxRows;
}

template <typename T>
static void pack_queries(const AttentionArgs& a, const Tile& tile, float factor, float* packed) {
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const int rows = tile.num_queries * group_heads;
  const int head_size = a.cache.head_size;
  const int64_t first = a.query_start_loc[tile.req] + tile.query_begin;
  const int64_t group_floats = static_cast<int64_t>(head_size) * kMaxRows;
  if (rows % kMaxRows != 0) {
    __builtin_memset(packed + rows / kMaxRows * group_floats, 0, group_floats * sizeof(float));
  }
  for (int row = 0; row < rows; ++row) {
    float* out = packed + row / kMaxRows * group_floats + row % kMaxRows;
    const T* query = static_cast<const T*>(a.query) +
                     (first + row / group_heads) * a.query_token_stride +
                     (tile.kv_head * group_heads + row % group_heads) * a.query_head_stride;
    for (int d = 0; d < head_size; ++d) out[d * kMaxRows] = to_float(query[d]) * factor;
  }
}

// target = packed, its first rotary_dim dims rotated by cos_sin [rotary_dim].
static void rotate_queries(const float* packed, int num_groups, int head_size, const float* cos_sin,
                           int rotary_dim, bool is_neox, float* target) {
  const int half = rotary_dim / 2;
  for (int g = 0; g < num_groups; ++g) {
    for (int i = 0; i < half; ++i) {
      const int first = (is_neox ? i : 2 * i) * kMaxRows;
      const int second = (is_neox ? i + half : 2 * i + 1) * kMaxRows;
      const float cos = cos_sin[i];
      const float sin = cos_sin[half + i];
      for (int r = 0; r < kMaxRows; ++r) {
        const float x = packed[first + r];
        const float y = packed[second + r];
        target[first + r] = x * cos - y * sin;
        target[second + r] = y * cos + x * sin;
      }
    }
    for (int i = rotary_dim * kMaxRows; i < head_size * kMaxRows; ++i) target[i] = packed[i];
    packed += head_size * kMaxRows;
    target += head_size * kMaxRows;
  }
}

}  // namespace choreo::CHOREO_ISA

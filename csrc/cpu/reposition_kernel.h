// SPDX-License-Identifier: Apache-2.0
// reposition_keys for one KV head of one block.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace choreo::CHOREO_ISA {

// Rows of a latent cache: the dims behind the value rotate, slot by slot.
template <typename T>
static void reposition_rows_as(const RepositionArgs& a, int move, int kv_head) {
  const CacheView& cache = a.cache;
  T* data = static_cast<T*>(cache.data) + kv_head * cache.head_stride;
  const T* src = data + a.src_blocks[move] * cache.block_stride;
  T* dst = data + a.dst_blocks[move] * cache.block_stride;
  const float* cos_sin = a.cos_sin + static_cast<int64_t>(move) * a.rotary_dim;
  const int half = a.rotary_dim / 2;
  if (src != dst) {
    __builtin_memcpy(dst, src, int64_t{cache.block_size} * cache.head_size * sizeof(T));
  }
  for (int slot = 0; slot < cache.block_size; ++slot) {
    T* row = dst + int64_t{slot} * cache.head_size + cache.rotary_offset();
    for (int i = 0; i < half; ++i) {
      T& first = row[a.is_neox ? i : 2 * i];
      T& second = row[a.is_neox ? i + half : 2 * i + 1];
      const float x = to_float(first);
      const float y = to_float(second);
      assign(first, x * cos_sin[i] - y * cos_sin[half + i]);
      assign(second, y * cos_sin[i] + x * cos_sin[half + i]);
    }
  }
}

// Keys are stored transposed, so a pair of dims is a pair of rows [block_size]: one cosine and one
// sine turn whole vectors. Every row is read before it is written: source may equal target.
template <typename T>
static void reposition_block_as(const RepositionArgs& a, int move, int kv_head) {
  if (a.cache.is_latent) return reposition_rows_as<T>(a, move, kv_head);
  const CacheView& cache = a.cache;
  T* data = static_cast<T*>(cache.data) + kv_head * cache.head_stride;
  const T* src = data + a.src_blocks[move] * cache.block_stride;
  T* dst = data + a.dst_blocks[move] * cache.block_stride;
  const float* cos_sin = a.cos_sin + static_cast<int64_t>(move) * a.rotary_dim;
  const int half = a.rotary_dim / 2;
  const int64_t size = cache.block_size;
  for (int i = 0; i < half; ++i) {
    const int64_t first = (a.is_neox ? i : 2 * i) * size;
    const int64_t second = (a.is_neox ? i + half : 2 * i + 1) * size;
    const Vec cos = broadcast(cos_sin[i]);
    const Vec sin = broadcast(cos_sin[half + i]);
    for (int64_t c = 0; c < size; c += kWidth) {
      const Vec x = load(src + first + c);
      const Vec y = load(src + second + c);
      store(dst + first + c, x * cos - y * sin);
      store(dst + second + c, y * cos + x * sin);
    }
  }
  if (src == dst) return;
  const int64_t rest = a.rotary_dim * size;  // keys that do not rotate, and all values
  __builtin_memcpy(dst + rest, src + rest, (2 * cache.head_size * size - rest) * sizeof(T));
}

static void reposition_block(const RepositionArgs& a, int move, int kv_head) {
  if (a.cache.dtype == DType::kFloat32) {
    reposition_block_as<float>(a, move, kv_head);
  } else {
    reposition_block_as<BFloat16>(a, move, kv_head);
  }
}

}  // namespace choreo::CHOREO_ISA

// SPDX-License-Identifier: Apache-2.0
// Cuts a piece of a span into chunks of slots that are scored, exponentiated and summed together.
#pragma once

#include "kernels.h"
#include "micro.h"

namespace choreo::CHOREO_ISA {

// Columns of scores held at once: more amortize the horizontal maximum and the load and store of
// the output, fewer keep the keys and values in the L1 cache. Decode, 9 / 3 heads of size 64, 4096
// tokens in the L3 cache, Zen 5: 64 columns 99 us, 128 columns 118 us.
constexpr int kChunkColumns = 64;
constexpr int kMaxStrips = kChunkColumns / kColumnStep;

// A run of slots inside one block. Its first column is aligned to kColumnStep; the first `lead`
// columns and those after the last token are padding, to be masked.
template <typename T>
struct Strip {
  const T* keys;    // [head_size, block_size], at the aligned first slot; latent: as `values`
  const T* values;  // [num_tokens, value_size], at the first token
  int column;       // in the matrix of scores
  int num_columns;
  int lead;
  int num_tokens;
  int64_t first_token;  // index in the piece
};

template <typename T>
struct Chunk {
  Strip<T> strips[kMaxStrips];
  int num_strips;
  int64_t end_token;  // index in the piece after the last token of the chunk
};

static CHOREO_INLINE int round_up(int x) {
  return (x + kColumnStep - 1) / kColumnStep * kColumnStep;
}

// Tokens [begin, end) of a piece, in the virtual sequence of request `req`.
struct PieceRange {
  int req;
  int64_t first_slot;  // of the piece's token 0
  int64_t begin;
  int64_t end;
};

// The cache of one KV head in the block that holds `slot` of a request.
template <typename T>
static CHOREO_INLINE const T* block_head(const AttentionArgs& a, int kv_head, int req,
                                         int64_t slot) {
  const int32_t* blocks = a.block_table + req * a.block_table_stride;
  return static_cast<const T*>(a.cache.data) +
         blocks[slot / a.cache.block_size] * a.cache.block_stride + kv_head * a.cache.head_stride;
}

// Fills `chunk` with the tokens from `token` on, at most to the end of the range.
template <typename T>
static void build_chunk(const AttentionArgs& a, int kv_head, const PieceRange& range, int64_t token,
                        Chunk<T>& chunk) {
  const CacheView& cache = a.cache;
  int column = 0;
  chunk.num_strips = 0;
  while (token < range.end && column < kChunkColumns) {
    const int64_t slot = range.first_slot + token;
    const int offset = static_cast<int>(slot % cache.block_size);
    const int lead = offset % kColumnStep;
    int64_t num_tokens = cache.block_size - offset;
    if (num_tokens > range.end - token) num_tokens = range.end - token;
    if (num_tokens > kChunkColumns - column - lead) num_tokens = kChunkColumns - column - lead;
    const T* head = block_head<T>(a, kv_head, range.req, slot);
    Strip<T>& strip = chunk.strips[chunk.num_strips++];
    if (cache.is_latent) {
      strip.keys = strip.values = head + static_cast<int64_t>(cache.head_size) * offset;
    } else {
      strip.keys = head + (offset - lead);
      strip.values =
          head + int64_t{cache.head_size} * cache.block_size + int64_t{cache.value_size} * offset;
    }
    strip.column = column;
    strip.num_tokens = static_cast<int>(num_tokens);
    strip.lead = lead;
    strip.num_columns = round_up(lead + strip.num_tokens);
    strip.first_token = token;
    column += strip.num_columns;
    token += num_tokens;
  }
  chunk.end_token = token;
}

// Floats that widen_chunk needs.
static CHOREO_INLINE int64_t widened_floats(const CacheView& cache) {
  return int64_t{kChunkColumns} * (cache.head_size + cache.value_size);
}

// A strip's keys in float32, transposed: [head_size, kChunkColumns] from its column on.
template <typename T>
static void widen_keys(const Strip<T>& p, const CacheView& cache, float* keys) {
  for (int d = 0; d < cache.head_size; ++d) {
    for (int c = 0; c < p.num_columns; c += kWidth) {
      store(keys + d * kChunkColumns + c, load(p.keys + d * cache.block_size + c));
    }
  }
}

// The same of a latent strip, whose keys are rows. Columns without a token get what is finite.
template <typename T>
static void transpose_keys(const Strip<T>& p, const CacheView& cache, float* keys) {
  for (int c = 0; c < p.num_columns; c += kWidth) {
    const T* rows[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      const int token = c + i - p.lead;
      const int last = p.num_tokens - 1;
      rows[i] = p.keys + int64_t{cache.head_size} * (token < 0 ? 0 : token > last ? last : token);
    }
    for (int d = 0; d < cache.head_size; d += kWidth) {
      Vec square[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) square[i] = load(rows[i] + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) store(keys + (d + i) * kChunkColumns + c, square[i]);
    }
  }
}

// Prepares a chunk for many rows to share the work: keys in float32, transposed
// [head_size, kChunkColumns], then values in float32 [kChunkColumns, value_size], both at the
// columns of the scores. Values that are float32 stay where they are. Returns the stride of values.
template <typename T>
static int widen_chunk(const Chunk<T>& chunk, const CacheView& cache, float* buffer,
                       Chunk<float>& wide) {
  float* all_values = buffer + static_cast<int64_t>(cache.head_size) * kChunkColumns;
  for (int i = 0; i < chunk.num_strips; ++i) {
    const Strip<T>& p = chunk.strips[i];
    float* keys = buffer + p.column;
    if (cache.is_latent) {
      transpose_keys(p, cache, keys);
    } else {
      widen_keys(p, cache, keys);
    }
    const float* values;
    if constexpr (sizeof(T) == sizeof(float)) {
      values = p.values;
    } else {
      float* target = all_values + static_cast<int64_t>(p.column + p.lead) * cache.value_size;
      values = target;
      for (int k = 0; k < p.num_tokens; ++k, target += cache.value_size) {
        const T* source = p.values + static_cast<int64_t>(k) * cache.value_stride();
        for (int d = 0; d < cache.value_size; d += kWidth) store(target + d, load(source + d));
      }
    }
    wide.strips[i] = {keys, values, p.column, p.num_columns, p.lead, p.num_tokens, p.first_token};
  }
  wide.num_strips = chunk.num_strips;
  return sizeof(T) == sizeof(float) ? cache.value_stride() : cache.value_size;
}

}  // namespace choreo::CHOREO_ISA

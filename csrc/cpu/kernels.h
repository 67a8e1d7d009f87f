// SPDX-License-Identifier: Apache-2.0
// The raw-pointer interface between the launcher and the kernels: plain structs, no torch.
#pragma once

#include <cstdint>

namespace choreo {

enum class DType { kFloat32, kBFloat16 };

// KV cache of one layer. Each (block, head) holds keys transposed [head_size, block_size], then
// values [block_size, head_size]; strides in elements.
struct CacheView {
  void* data;
  int64_t block_stride;
  int64_t head_stride;
  int num_blocks;
  int num_kv_heads;
  int block_size;  // multiple of kColumnStep
  int head_size;   // multiple of kColumnStep
  DType dtype;     // also of queries and outputs
};

// One call of span_attention; arrays as in vllm_choreo/ops/spans.py (SpanBatch).
struct AttentionArgs {
  CacheView cache;
  const void* query;  // [num_tokens, num_heads, head_size], strides below, last dim contiguous
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* output;  // like query
  int64_t output_token_stride;
  int64_t output_head_stride;
  int num_heads;
  int num_reqs;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* block_table;      // [num_reqs, block_table_stride]
  int64_t block_table_stride;
  int64_t max_blocks;              // entries in a row
  const int32_t* span_start_loc;   // [num_reqs + 1]
  const int32_t* first_slot;       // [num_spans]
  const int32_t* num_tokens;       // [num_spans]
  const int32_t* stored_position;  // [num_spans]
  const int32_t* position_delta;   // [num_spans]
  const float* cos_sin;            // [num_spans, rotary_dim] or null
  int rotary_dim;
  bool is_neox;
  float scale;
  float softcap;              // 0: none
  const float* alibi_slopes;  // [num_heads] or null
};

// One unit of work: consecutive queries of one request, all query heads of one KV head, and the
// tokens [kv_begin, kv_end) of the request's spans laid end to end.
struct Tile {
  int req;
  int kv_head;
  int query_begin;  // within the request
  int num_queries;
  int64_t kv_begin;
  int64_t kv_end;
};

// What a tile leaves when others share its queries: float32, lse base 2.
// out [rows, head_size] unnormalized, row_max [rows], row_sum [rows]; row = query * group + head.
struct Partial {
  float* out;
  float* row_max;
  float* row_sum;
};

struct RepositionArgs {
  CacheView cache;
  const int32_t* src_blocks;  // [num_moves]
  const int32_t* dst_blocks;  // [num_moves]
  const float* cos_sin;       // [num_moves, rotary_dim]
  int num_moves;
  int rotary_dim;
  bool is_neox;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  // Floats of scratch that attend_tile needs for `rows` (queries * heads per KV head).
  int64_t (*scratch_floats)(int rows, int head_size);
  // Writes the outputs of the tile, or its partial result if `partial` is not null.
  void (*attend_tile)(const AttentionArgs&, const Tile&, float* scratch, const Partial* partial);
  // Merges the partial results of tiles that share their queries, and writes the outputs.
  void (*merge_partials)(const AttentionArgs&, const Tile&, const Partial*, int num_partials);
  // Rotates the keys of one KV head of one block; copies its values if source and target differ.
  void (*reposition_block)(const RepositionArgs&, int move, int kv_head);
};

// Keys are scored in groups of this many slots, so sub-spans may begin anywhere.
constexpr int kColumnStep = 16;

#if defined(__x86_64__)
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#endif
extern const Kernels kPortableKernels;

}  // namespace choreo

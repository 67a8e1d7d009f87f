// SPDX-License-Identifier: Apache-2.0
// The raw-pointer interface between the launcher and the kernels: plain structs, no torch.
#pragma once

#include <cstdint>

namespace choreo {

enum class DType { kFloat32, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

// KV cache of one layer. Each (block, head) holds keys transposed [head_size, block_size], then
// values [block_size, value_size]; or, if it is latent, rows [block_size, head_size]: a row is a
// key, its first value_size entries are the value, and those behind them rotate. Strides in
// elements.
struct CacheView {
  void* data;
  int64_t block_stride;
  int64_t head_stride;
  int num_blocks;
  int num_kv_heads;
  int block_size;  // multiple of kColumnStep
  int head_size;   // of queries and keys, multiple of kColumnStep
  int value_size;  // of values and outputs, multiple of kColumnStep
  bool is_latent;
  DType dtype;

  // First dim of a query or key that rotates.
  int rotary_offset() const { return is_latent ? value_size : 0; }
  // From one value to the next.
  int value_stride() const { return is_latent ? head_size : value_size; }
};

// Which tokens are read together; arrays as in vllm_choreo/ops/sharing.py (SharedReads). Group r
// below num_reqs is request r alone and ends with its own span, which is not listed.
struct Reads {
  int num_groups;
  int first_chosen;                 // groups from here on count by other weights, one request each
  const int32_t* member_start_loc;  // [num_groups + 1]
  const int32_t* member_req;        // [num_members]
  const int32_t* piece_start_loc;   // [num_groups + 1]
  const int32_t* piece_tokens;      // [num_pieces]
  const int32_t* read_start_loc;    // [num_groups + 1]
  const int32_t* read_span;         // [num_reads], per group [pieces, members]
  const int32_t* read_begin;        // [num_reads]
};

// What one step reads, the same for all layers that attend to the same spans; arrays as in
// vllm_choreo/ops/spans.py (SpanBatch).
struct Step {
  int num_reqs;
  int num_spans;
  int block_size;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* block_table;      // [num_reqs, block_table_stride]
  int64_t block_table_stride;
  const int32_t* span_start_loc;   // [num_reqs + 1]
  const int32_t* first_slot;       // [num_spans]
  const int32_t* num_tokens;       // [num_spans]
  const int32_t* stored_position;  // [num_spans]
  const int32_t* position_delta;   // [num_spans]
  Reads reads;
  const float* temperature;  // [num_reqs], of the scores of chosen spans; or null
  const float* factor;       // [num_reqs], of their log-sum-exp; or null
  const float* cos_sin;      // [num_spans, rotary_dim] or null
  int rotary_dim;
};

// What a layer is, in every step; as in vllm_choreo/ops/plan.py (LayerAttention).
struct Layer {
  bool is_neox;
  float scale;
  float softcap;              // 0: none
  const float* alibi_slopes;  // [num_heads] or null
  int window;                 // tokens that a query sees to its left, itself included; 0: all
  const float* sinks;         // [num_heads] or null
  float key_scale;            // a key is what the cache holds, times this
  float value_scale;          // likewise
};

// One call of span_attention.
struct AttentionArgs : Step, Layer {
  CacheView cache;
  const void* query;  // [num_tokens, num_heads, head_size], strides below, last dim contiguous
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* output;  // [num_tokens, num_heads, value_size], likewise
  int64_t output_token_stride;
  int64_t output_head_stride;
  int num_heads;
  DType dtype;  // of queries and outputs; the cache has the same, or 8 bits
};

// Consecutive queries of one request, with all query heads of one KV head: rows of a tile,
// row = first_row + query * heads per KV head + head.
struct Member {
  int req;
  int column;       // of the reads of its group
  int query_begin;  // within the request
  int num_queries;
  int first_row;
};

// One unit of work: some queries of the members of a group, for one KV head, and the tokens
// [kv_begin, kv_end) of the group's pieces laid end to end, without their hidden_tokens. The own
// span, which comes last in a group of one request, is causal: such tiles have one member.
struct Tile {
  int group;
  int kv_head;
  const Member* members;
  int num_members;
  int num_rows;
  int64_t kv_begin;
  int64_t kv_end;
};

// What a tile leaves of a member when other tiles share its queries, in float32:
// out [rows, value_size] unnormalized, then maxima [rows] and sums [rows] of the softmax, base 2.
constexpr int64_t partial_floats(int64_t rows, int value_size) {
  return rows * (value_size + 2);
}

struct RepositionArgs {
  CacheView cache;
  const int32_t* src_blocks;  // [num_moves]
  const int32_t* dst_blocks;  // [num_moves]
  const float* cos_sin;       // [num_moves, rotary_dim]
  int num_moves;
  int rotary_dim;
  bool is_neox;
};

// One pair of an adapter's matrices: from ranks to columns of the output.
struct AdapterSlice {
  const void* expand;  // [num_ranks, num_columns], in the type of the rows
  int first_rank;
  int num_ranks;
  int64_t first_column;
  int64_t num_columns;
};

// rows of y += round(rows of x * shrink * scale) * expand, slice by slice.
struct AdapterArgs {
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  const int64_t* rows;  // [num_rows], which of x and y
  int64_t num_rows;
  DType dtype;          // of x, y and the slices
  const float* shrink;  // [in_features, num_ranks]
  int64_t in_features;
  int num_ranks;  // multiple of kColumnStep; those beyond the adapter's are zeros
  const AdapterSlice* slices;
  int num_slices;
  float scale;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  // Floats of scratch that attend_tile needs for a tile of `rows`.
  int64_t (*scratch_floats)(int rows, const CacheView& cache);
  // Writes the outputs of each member of the tile, or its partial result where there is one.
  void (*attend_tile)(const AttentionArgs&, const Tile&, float* scratch, float* const* partials);
  // Merges the partial results of a member, `stride` floats apart, into the first, and writes
  // the outputs. The first `num_chosen` of them count by other weights.
  void (*merge_partials)(const AttentionArgs&, const Member&, int kv_head, float* partials,
                         int64_t stride, int num_partials, int num_chosen);
  // Rotates the keys of one KV head of one block; copies its values if source and target differ.
  void (*reposition_block)(const RepositionArgs&, int move, int kv_head);
  // Adds to the rows [begin, end) of an adapter. Scratch: kAdapterRows * num_ranks floats.
  void (*add_adapter)(const AdapterArgs&, int64_t begin, int64_t end, float* scratch);
};

// Rows of an adapter that share one pass over its matrices: 12 accumulators of AVX2's 16 registers.
constexpr int kAdapterRows = 6;

// Keys are scored in groups of this many slots, so sub-spans may begin anywhere.
constexpr int kColumnStep = 16;

#if defined(__x86_64__)
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#endif
extern const Kernels kPortableKernels;

}  // namespace choreo

// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_choreo: turns tensors into raw pointers. Shapes are checked in Python
// (vllm_choreo/ops/dispatch.py); what would read or write out of bounds is checked here again.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "isa.h"
#include "launcher.h"

namespace {

using at::Tensor;
using choreo::CacheView;

void check_ints(const Tensor& t, const char* name, int64_t numel) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.scalar_type() == at::kInt && t.is_contiguous(), name,
                    " must be a contiguous int32 tensor on the CPU");
  TORCH_CHECK_VALUE(t.numel() == numel, name, " has ", t.numel(), " entries, expected ", numel);
}

void check_floats(const Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous(), name,
                    " must be a contiguous float32 tensor on the CPU");
}

CacheView make_cache_view(const Tensor& cache) {
  TORCH_CHECK_VALUE(cache.is_cpu() && cache.dim() == 4, "kv_cache must be 4-D on the CPU");
  TORCH_CHECK_VALUE(cache.scalar_type() == at::kFloat || cache.scalar_type() == at::kBFloat16,
                    "the CPU kernel takes float32 and bfloat16, not ", cache.scalar_type());
  TORCH_CHECK_VALUE(cache.stride(3) == 1 && cache.stride(2) == cache.size(3),
                    "kv_cache must be contiguous within each (block, head)");
  const int64_t block_size = cache.size(2);
  const int64_t head_size = cache.size(3) / 2;
  TORCH_CHECK_VALUE(block_size % choreo::kColumnStep == 0 && block_size > 0,
                    "the CPU kernel needs a block size that is a multiple of 16, not ", block_size);
  TORCH_CHECK_VALUE(head_size % choreo::kColumnStep == 0 && head_size > 0 && head_size <= 512,
                    "the CPU kernel needs a head size that is a multiple of 16 up to 512, not ",
                    head_size);
  return {cache.data_ptr(),
          cache.stride(0),
          cache.stride(1),
          static_cast<int>(cache.size(0)),
          static_cast<int>(cache.size(1)),
          static_cast<int>(block_size),
          static_cast<int>(head_size),
          cache.scalar_type() == at::kFloat ? choreo::DType::kFloat32 : choreo::DType::kBFloat16};
}

void check_rows(const Tensor& t, const char* name, const Tensor& cache, int64_t num_tokens) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.dim() == 3 && t.stride(2) == 1, name,
                    " must be [num_tokens, num_heads, head_size] with a contiguous last dim");
  TORCH_CHECK_VALUE(t.scalar_type() == cache.scalar_type(), name, " and kv_cache differ in dtype");
  TORCH_CHECK_VALUE(t.size(2) * 2 == cache.size(3), name, " and kv_cache differ in head size");
  TORCH_CHECK_VALUE(t.size(0) >= num_tokens, name, " has ", t.size(0),
                    " tokens, but query_start_loc ends at ", num_tokens);
}

// Starts must begin at 0 and not decrease, or the kernel would read out of bounds.
void check_starts(const int32_t* starts, int num_reqs, int min_step, const char* name) {
  TORCH_CHECK_VALUE(starts[0] == 0, name, " must begin with 0");
  for (int r = 0; r < num_reqs; ++r) {
    TORCH_CHECK_VALUE(starts[r + 1] - starts[r] >= min_step, name, " must grow by at least ",
                      min_step, " at request ", r);
  }
}

using Ints = const std::optional<Tensor>&;

// The groups of SharedReads; none if not given. What they name is checked by the launcher.
choreo::Reads make_reads(int num_reqs, Ints member_start_loc, Ints member_req, Ints piece_start_loc,
                         Ints piece_tokens, Ints read_start_loc, Ints read_span, Ints read_begin) {
  if (!member_start_loc) return {};
  TORCH_CHECK_VALUE(
      member_req && piece_start_loc && piece_tokens && read_start_loc && read_span && read_begin,
      "the arrays of reads come together");
  const int64_t num_groups = member_start_loc->numel() - 1;
  TORCH_CHECK_VALUE(num_groups >= num_reqs, "reads has ", num_groups, " groups for ", num_reqs,
                    " requests");
  check_ints(*member_start_loc, "member_start_loc", num_groups + 1);
  check_ints(*piece_start_loc, "piece_start_loc", num_groups + 1);
  check_ints(*read_start_loc, "read_start_loc", num_groups + 1);
  const int32_t* members = member_start_loc->const_data_ptr<int32_t>();
  const int32_t* pieces = piece_start_loc->const_data_ptr<int32_t>();
  const int32_t* reads = read_start_loc->const_data_ptr<int32_t>();
  check_starts(members, static_cast<int>(num_groups), 1, "member_start_loc");
  check_starts(pieces, static_cast<int>(num_groups), 0, "piece_start_loc");
  check_starts(reads, static_cast<int>(num_groups), 0, "read_start_loc");
  for (int64_t g = 0; g < num_groups; ++g) {
    TORCH_CHECK_VALUE(
        reads[g + 1] - reads[g] == (members[g + 1] - members[g]) * (pieces[g + 1] - pieces[g]),
        "read_start_loc must grow by pieces * members at group ", g);
  }
  check_ints(*member_req, "member_req", members[num_groups]);
  check_ints(*piece_tokens, "piece_tokens", pieces[num_groups]);
  check_ints(*read_span, "read_span", reads[num_groups]);
  check_ints(*read_begin, "read_begin", reads[num_groups]);
  return {static_cast<int>(num_groups),
          members,
          member_req->const_data_ptr<int32_t>(),
          pieces,
          piece_tokens->const_data_ptr<int32_t>(),
          reads,
          read_span->const_data_ptr<int32_t>(),
          read_begin->const_data_ptr<int32_t>()};
}

void span_attention(const Tensor& query, const Tensor& kv_cache, Tensor output,
                    const Tensor& query_start_loc, const Tensor& block_table,
                    const Tensor& span_start_loc, const Tensor& first_slot,
                    const Tensor& num_tokens, const Tensor& stored_position,
                    const Tensor& position_delta, double scale,
                    const std::optional<Tensor>& cos_sin, bool is_neox, double softcap,
                    const std::optional<Tensor>& alibi_slopes, Ints member_start_loc,
                    Ints member_req, Ints piece_start_loc, Ints piece_tokens, Ints read_start_loc,
                    Ints read_span, Ints read_begin) {
  const int num_reqs = static_cast<int>(query_start_loc.numel()) - 1;
  const int64_t num_spans = first_slot.numel();
  TORCH_CHECK_VALUE(num_reqs >= 0, "query_start_loc is empty");
  check_ints(query_start_loc, "query_start_loc", num_reqs + 1);
  check_ints(span_start_loc, "span_start_loc", num_reqs + 1);
  check_ints(first_slot, "first_slot", num_spans);
  check_ints(num_tokens, "num_tokens", num_spans);
  check_ints(stored_position, "stored_position", num_spans);
  check_ints(position_delta, "position_delta", num_spans);
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* spans = span_start_loc.const_data_ptr<int32_t>();
  check_starts(starts, num_reqs, 0, "query_start_loc");
  check_starts(spans, num_reqs, 1, "span_start_loc");
  TORCH_CHECK_VALUE(spans[num_reqs] == num_spans, "span_start_loc must end at the number of spans");
  TORCH_CHECK_VALUE(block_table.is_cpu() && block_table.dim() == 2 &&
                        block_table.scalar_type() == at::kInt && block_table.size(0) >= num_reqs &&
                        block_table.stride(1) == 1,
                    "block_table must be int32 [num_reqs, max_blocks] with contiguous rows");
  const CacheView cache = make_cache_view(kv_cache);
  check_rows(query, "query", kv_cache, starts[num_reqs]);
  check_rows(output, "output", kv_cache, starts[num_reqs]);
  TORCH_CHECK_VALUE(query.size(1) % cache.num_kv_heads == 0 && output.size(1) == query.size(1),
                    "query heads must be a multiple of KV heads, and as many in output");
  TORCH_CHECK_VALUE(softcap >= 0, "softcap is ", softcap, "; use 0 for none");
  if (cos_sin) {
    check_floats(*cos_sin, "cos_sin");
    TORCH_CHECK_VALUE(cos_sin->dim() == 2 && cos_sin->size(0) == num_spans &&
                          cos_sin->size(1) % 2 == 0 && cos_sin->size(1) <= cache.head_size,
                      "cos_sin must be [num_spans, rotary_dim]");
  }
  if (alibi_slopes) {
    check_floats(*alibi_slopes, "alibi_slopes");
    TORCH_CHECK_VALUE(alibi_slopes->numel() == query.size(1), "alibi_slopes must be [num_heads]");
  }
  const choreo::AttentionArgs args = {
      cache,
      query.data_ptr(),
      query.stride(0),
      query.stride(1),
      output.data_ptr(),
      output.stride(0),
      output.stride(1),
      static_cast<int>(query.size(1)),
      num_reqs,
      starts,
      block_table.const_data_ptr<int32_t>(),
      block_table.stride(0),
      block_table.size(1),
      spans,
      first_slot.const_data_ptr<int32_t>(),
      num_tokens.const_data_ptr<int32_t>(),
      stored_position.const_data_ptr<int32_t>(),
      position_delta.const_data_ptr<int32_t>(),
      make_reads(num_reqs, member_start_loc, member_req, piece_start_loc, piece_tokens,
                 read_start_loc, read_span, read_begin),
      cos_sin ? cos_sin->const_data_ptr<float>() : nullptr,
      cos_sin ? static_cast<int>(cos_sin->size(1)) : 0,
      is_neox,
      static_cast<float>(scale),
      static_cast<float>(softcap),
      alibi_slopes ? alibi_slopes->const_data_ptr<float>() : nullptr,
  };
  choreo::run_span_attention(args);
}

void reposition_keys(Tensor kv_cache, const Tensor& src_blocks, const Tensor& dst_blocks,
                     const Tensor& cos_sin, bool is_neox) {
  const int64_t num_moves = src_blocks.numel();
  const CacheView cache = make_cache_view(kv_cache);
  check_ints(src_blocks, "src_blocks", num_moves);
  check_ints(dst_blocks, "dst_blocks", num_moves);
  check_floats(cos_sin, "cos_sin");
  TORCH_CHECK_VALUE(cos_sin.dim() == 2 && cos_sin.size(0) == num_moves &&
                        cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= cache.head_size,
                    "cos_sin must be [n, rotary_dim]");
  choreo::run_reposition_keys({cache, src_blocks.const_data_ptr<int32_t>(),
                               dst_blocks.const_data_ptr<int32_t>(),
                               cos_sin.const_data_ptr<float>(), static_cast<int>(num_moves),
                               static_cast<int>(cos_sin.size(1)), is_neox});
}

void use_isa(const std::string& name) {
  TORCH_CHECK_VALUE(choreo::use_isa(name), "instruction set '", name,
                    "' is not available; see available_isas()");
}

}  // namespace

TORCH_LIBRARY(vllm_choreo, m) {
  m.def(
      "span_attention(Tensor query, Tensor kv_cache, Tensor(a!) output, Tensor query_start_loc, "
      "Tensor block_table, Tensor span_start_loc, Tensor first_slot, Tensor num_tokens, "
      "Tensor stored_position, Tensor position_delta, float scale, Tensor? cos_sin, "
      "bool is_neox, float softcap, Tensor? alibi_slopes, Tensor? member_start_loc, "
      "Tensor? member_req, Tensor? piece_start_loc, Tensor? piece_tokens, "
      "Tensor? read_start_loc, Tensor? read_span, Tensor? read_begin) -> ()");
  m.def(
      "reposition_keys(Tensor(a!) kv_cache, Tensor src_blocks, Tensor dst_blocks, "
      "Tensor cos_sin, bool is_neox) -> ()");
  m.def("available_isas() -> str[]", &choreo::available_isas);
  m.def("use_isa(str name) -> ()", &use_isa);
}

TORCH_LIBRARY_IMPL(vllm_choreo, CPU, m) {
  m.impl("span_attention", &span_attention);
  m.impl("reposition_keys", &reposition_keys);
}

// `import vllm_choreo._C` registers the operators above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

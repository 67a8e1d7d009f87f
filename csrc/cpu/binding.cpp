// SPDX-License-Identifier: Apache-2.0
// The Python module vllm_choreo._C: turns tensors into raw pointers. Shapes are checked in Python
// (vllm_choreo/ops/dispatch.py); what would read or write out of bounds is checked here again.
//
// Functions of pybind11, not operators of torch.library: such a call with an object among its
// arguments takes 18 us, one of these 3 us, little work of a layer included (Zen 5, torch 2.13).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "adapter.h"
#include "checks.h"
#include "isa.h"
#include "launcher.h"
#include "span_plan.h"

namespace {

namespace py = pybind11;
using at::Tensor;
using choreo::Arrays;
using choreo::CacheView;
using choreo::SpanPlan;

// The type of queries, outputs, and of caches that are not quantized.
choreo::DType plain_dtype(const Tensor& t) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16,
                    "the CPU kernel takes float32 and bfloat16, not ", t.scalar_type());
  return t.scalar_type() == at::kFloat ? choreo::DType::kFloat32 : choreo::DType::kBFloat16;
}

// Sizes of a head: a cache whose values are given a size is latent.
CacheView make_cache_view(const Tensor& cache, choreo::DType dtype,
                          std::optional<int64_t> latent_value_size) {
  TORCH_CHECK_VALUE(cache.is_cpu() && cache.dim() == 4, "kv_cache must be 4-D on the CPU");
  TORCH_CHECK_VALUE(cache.stride(3) == 1 && cache.stride(2) == cache.size(3),
                    "kv_cache must be contiguous within each (block, head)");
  const int64_t block_size = cache.size(2);
  const bool is_latent = latent_value_size.has_value();
  const int64_t head_size = is_latent ? cache.size(3) : cache.size(3) / 2;
  const int64_t value_size = latent_value_size.value_or(head_size);
  TORCH_CHECK_VALUE(block_size % choreo::kColumnStep == 0 && block_size > 0,
                    "the CPU kernel needs a block size that is a multiple of 16, not ", block_size);
  TORCH_CHECK_VALUE(head_size % choreo::kColumnStep == 0 && head_size > 0 && head_size <= 576,
                    "the CPU kernel needs a head size that is a multiple of 16 up to 576, not ",
                    head_size);
  TORCH_CHECK_VALUE(
      value_size % choreo::kColumnStep == 0 && value_size > 0 && value_size <= head_size,
      "the CPU kernel needs values whose size is a multiple of 16 and at most that "
      "of the head, not ",
      value_size);
  return {cache.data_ptr(),
          cache.stride(0),
          cache.stride(1),
          static_cast<int>(cache.size(0)),
          static_cast<int>(cache.size(1)),
          static_cast<int>(block_size),
          static_cast<int>(head_size),
          static_cast<int>(value_size),
          is_latent,
          dtype};
}

void check_rows(const Tensor& t, const char* name, const Tensor& cache, int64_t num_tokens,
                int64_t size) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.dim() == 3 && t.stride(2) == 1, name,
                    " must be [num_tokens, num_heads, size] with a contiguous last dim");
  TORCH_CHECK_VALUE(t.size(2) == size, name, " and kv_cache differ in head size");
  TORCH_CHECK_VALUE(t.size(0) >= num_tokens, name, " has ", t.size(0),
                    " tokens, but query_start_loc ends at ", num_tokens);
}

// What a layer is, in every step. The tensors keep the pointers of `layer` alive.
struct LayerAttention {
  choreo::Layer layer;
  std::optional<Tensor> slopes;
  std::optional<Tensor> sinks;
  std::optional<choreo::DType> quantized;  // type of the numbers whose bytes the cache holds
  std::optional<int64_t> latent_value_size;
};

std::optional<choreo::DType> quantized_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "float8_e4m3fn") return choreo::DType::kFloat8E4M3;
  TORCH_CHECK_VALUE(name == "float8_e5m2", "the CPU kernel reads no caches of ", name);
  return choreo::DType::kFloat8E5M2;
}

// The type of the numbers in a layer's cache.
choreo::DType cached_dtype(const Tensor& cache, const LayerAttention& layer, const Tensor& query) {
  const bool fits = layer.quantized ? cache.scalar_type() == at::kByte
                                    : cache.scalar_type() == query.scalar_type();
  TORCH_CHECK_VALUE(fits, "query is ", query.scalar_type(), ", kv_cache ", cache.scalar_type(),
                    layer.quantized ? "; a quantized cache is uint8" : "; they differ in dtype");
  return layer.quantized ? *layer.quantized : plain_dtype(cache);
}

const float* floats(const std::optional<Tensor>& tensor, const char* name) {
  if (!tensor) return nullptr;
  choreo::check_floats(*tensor, name);
  return tensor->const_data_ptr<float>();
}

std::unique_ptr<LayerAttention> make_layer(
    double scale, bool is_neox, double softcap, const std::optional<Tensor>& alibi_slopes,
    std::optional<int64_t> window, const std::optional<Tensor>& sinks, const std::string& quantized,
    double key_scale, double value_scale, std::optional<int64_t> latent_value_size) {
  TORCH_CHECK_VALUE(quantized.empty() || !latent_value_size,
                    "a latent cache is not quantized: its rows, which are keys and values at once, "
                    "would have a scale of each");
  TORCH_CHECK_VALUE(softcap >= 0, "softcap is ", softcap, "; use 0 for none");
  TORCH_CHECK_VALUE(!window || *window >= 1, "window is ", *window, "; use None for none");
  const choreo::Layer layer = {is_neox,
                               static_cast<float>(scale),
                               static_cast<float>(softcap),
                               floats(alibi_slopes, "alibi_slopes"),
                               static_cast<int>(window.value_or(0)),
                               floats(sinks, "sinks"),
                               static_cast<float>(key_scale),
                               static_cast<float>(value_scale)};
  return std::make_unique<LayerAttention>(
      LayerAttention{layer, alibi_slopes, sinks, quantized_dtype(quantized), latent_value_size});
}

void check_per_head(const std::optional<Tensor>& tensor, const char* name, int num_heads) {
  TORCH_CHECK_VALUE(!tensor || tensor->numel() == num_heads, name, " must be [num_heads]");
}

void span_attention(const Tensor& query, const Tensor& kv_cache, Tensor output, SpanPlan& plan,
                    const LayerAttention& layer) {
  const choreo::Step& step = plan.step();
  const CacheView cache =
      make_cache_view(kv_cache, cached_dtype(kv_cache, layer, query), layer.latent_value_size);
  TORCH_CHECK_VALUE(output.scalar_type() == query.scalar_type(),
                    "output and query differ in dtype");
  const int num_tokens = step.query_start_loc[step.num_reqs];
  check_rows(query, "query", kv_cache, num_tokens, cache.head_size);
  check_rows(output, "output", kv_cache, num_tokens, cache.value_size);
  const int num_heads = static_cast<int>(query.size(1));
  TORCH_CHECK_VALUE(num_heads % cache.num_kv_heads == 0 && output.size(1) == num_heads,
                    "query heads must be a multiple of KV heads, and as many in output");
  check_per_head(layer.slopes, "alibi_slopes", num_heads);
  check_per_head(layer.sinks, "sinks", num_heads);
  plan.check_cache(cache);
  const choreo::AttentionArgs args = {step,
                                      layer.layer,
                                      cache,
                                      query.data_ptr(),
                                      query.stride(0),
                                      query.stride(1),
                                      output.data_ptr(),
                                      output.stride(0),
                                      output.stride(1),
                                      num_heads,
                                      plain_dtype(query)};
  const choreo::Tiles& tiles =
      plan.tiles({num_heads, cache.num_kv_heads, cache.head_size, cache.value_size,
                  at::get_num_threads(), layer.layer.window});
  choreo::run_span_attention(args, tiles);
}

// Bytes of the partial results of a layer of such a shape.
int64_t partial_bytes(SpanPlan& plan, int num_heads, int num_kv_heads, int head_size) {
  const choreo::LayerShape shape = {num_heads, num_kv_heads,          head_size,
                                    head_size, at::get_num_threads(), 0};
  return plan.tiles(shape).num_partial_floats * static_cast<int64_t>(sizeof(float));
}

void reposition_keys(Tensor kv_cache, const Tensor& src_blocks, const Tensor& dst_blocks,
                     const Tensor& cos_sin, bool is_neox,
                     std::optional<int64_t> latent_value_size) {
  const int64_t num_moves = src_blocks.numel();
  const CacheView cache = make_cache_view(kv_cache, plain_dtype(kv_cache), latent_value_size);
  choreo::check_ints(src_blocks, "src_blocks", num_moves);
  choreo::check_ints(dst_blocks, "dst_blocks", num_moves);
  choreo::check_floats(cos_sin, "cos_sin");
  TORCH_CHECK_VALUE(cos_sin.dim() == 2 && cos_sin.size(0) == num_moves &&
                        cos_sin.size(1) % 2 == 0 &&
                        cos_sin.size(1) <= cache.head_size - cache.rotary_offset(),
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

PYBIND11_MODULE(_C, m) {
  // pybind11 knows the exceptions of the standard library.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
    } catch (const c10::IndexError& error) {
      PyErr_SetString(PyExc_IndexError, error.what_without_backtrace());
    }
  });
  using without_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<LayerAttention>(m, "LayerAttention")
      .def(py::init(&make_layer), py::arg("scale"), py::arg("is_neox"), py::arg("softcap"),
           py::arg("alibi_slopes"), py::arg("window") = py::none(), py::arg("sinks") = py::none(),
           py::arg("quantized") = "", py::arg("key_scale") = 1.0, py::arg("value_scale") = 1.0,
           py::arg("latent_value_size") = py::none());
  py::class_<SpanPlan>(m, "SpanPlan")
      .def(py::init<const Arrays&, const std::optional<Arrays>&, const std::optional<Tensor>&,
                    int64_t, int64_t, const std::optional<Arrays>&>(),
           py::arg("spans"), py::arg("reads"), py::arg("cos_sin"), py::arg("block_size"),
           py::arg("first_chosen"), py::arg("reweighting"))
      .def("partial_bytes", &partial_bytes, py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_size"));
  py::class_<choreo::Adapter>(m, "Adapter")
      .def(py::init<const Tensor&, const std::vector<choreo::Adapter::Slice>&>(), py::arg("shrink"),
           py::arg("slices"))
      .def("add", &choreo::Adapter::add, without_gil(), py::arg("y"), py::arg("x"), py::arg("rows"),
           py::arg("scale"));
  m.def("span_attention", &span_attention, without_gil());
  m.def("reposition_keys", &reposition_keys, without_gil());
  m.def("available_isas", &choreo::available_isas);
  m.def("use_isa", &use_isa);
}

# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for operations that vLLM's CUDA builds have compiled, in Triton and in PyTorch.

With them vLLM's CUDA engine runs where another build of it is installed, beside a PyTorch for CUDA:
its platform, worker, runners, sampler, graphs and Triton attention are its own. FlashAttention,
FlashInfer and fused experts are not there. What these operations compute is tested in
`tests/benchmarks/test_gpu_engine.py`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# Of `torch.ops._C`: named when vLLM is imported or layers are made, called by no engine here.
_NAMED = (
    *("static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant"),
    *("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant", "silu_and_mul_quant"),
    *("rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant", "fused_qk_norm_rope"),
    *("silu_and_mul_per_block_quant", "gelu_tanh_and_mul", "gelu_and_mul", "gelu_new", "gelu_fast"),
    *("gelu_quick", "relu_squared", "relu2", "fatrelu_and_mul", "mul_and_silu"),
    *("silu_and_mul_with_clamp", "swigluoai_and_mul", "swiglustep_and_mul"),
)
# What a GPU can do by compiled code that is not there.
_CANNOT = (
    *("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"),
    *("cutlass_scaled_mm_supports_fp4", "cutlass_group_gemm_supported"),
)
_SCHEMAS = {
    "rms_norm": "(Tensor(a!) out, Tensor x, Tensor weight, float epsilon) -> ()",
    "fused_add_rms_norm": "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
    "silu_and_mul": "(Tensor(a!) out, Tensor x) -> ()",
    "rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
}
_library = torch.library.Library("_C", "FRAGMENT")
# Integers of so many bytes, as NumPy's interface of arrays names them: it has no bfloat16.
_INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


def install() -> None:
    """Before vLLM is imported: have it take this machine's GPU, without its compiled code."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name in _COMPILED:
        sys.modules[name] = ModuleType(name)
    define()
    import vllm.platforms as platforms

    matches = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda part: part != "cpu" and matches(part)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # which would have no stand-ins


def define() -> None:
    """Define the operations, once in a process."""
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, globals()[name], "CompositeExplicitAutograd")
    for name in _NAMED:
        _library.define(f"{name}(Tensor output) -> ()")
    for name in _CANNOT:
        setattr(torch.ops._C, name, lambda *args: False)
    torch.ops._C.weak_ref_tensor = torch.ops._C.get_cuda_view_from_cpu_tensor = alias


def install_mla() -> None:
    """After vLLM is imported: have MLA's rows stored, and ordinary prompts read, by PyTorch."""
    import vllm.model_executor.layers.attention.mla_attention as mla
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
    from vllm.v1.attention.ops import merge_attn_states

    from vllm_choreo.testing.latents import store_latents

    _custom_ops.concat_and_cache_mla = store_latents
    _custom_ops.gather_and_maybe_dequant_cache = _gather_latents
    mla.merge_attn_states = merge_attn_states._merge_attn_states_torch
    type(current_platform).get_mla_prefill_backend_cls = classmethod(
        lambda cls, config: CPUSDPAMLAPrefillBackend
    )
    TritonMLABackend.supported_dtypes = [*TritonMLABackend.supported_dtypes, torch.float32]


# -- operations ------------------------------------------------------------------------------------


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Write the normalised rows of `x` to `out`."""
    size = x.shape[-1]
    rows, written = x.reshape(-1, size) if x.dim() != 2 else x, out.view(-1, size)
    _norm[(len(rows),)](
        written, rows, rows, weight, size, rows.stride(0), written.stride(0), epsilon,
        False, triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add `x` to the residual, and write the normalised rows of the sum to `x`."""
    size = x.shape[-1]
    _norm[(x.numel() // size,)](
        x, x, residual, weight, size, x.stride(0), x.stride(0), epsilon,
        True, triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write SiLU of the first halves of rows, times the second halves."""
    size = out.shape[-1]
    _silu[(out.numel() // size, triton.cdiv(size, 1024))](out, x, size, 1024)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate whole heads of queries and keys where they lie."""
    if not is_neox or inverse or cos_sin_cache.shape[1] != head_size or rope_dim_offset:
        raise NotImplementedError("of rotary embeddings: whole heads, in halves")
    for heads in (query, key):
        if heads is not None:
            rows = heads.view(len(positions), -1)
            grid = len(positions), rows.shape[1] // head_size
            _rotate[grid](positions, rows, cos_sin_cache, rows.stride(0), head_size, head_size // 2)


@triton.jit
def _norm(
    out, x, residual, weight, size, x_stride, out_stride, epsilon,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if ADDS:
        found += tl.load(residual + row * size + at, inside, 0.0).to(tl.float32)
        tl.store(residual + row * size + at, found.to(residual.dtype.element_ty), inside)
    scale = 1.0 / tl.sqrt(tl.sum(found * found) / size + epsilon)
    scaled = found * scale * tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def _silu(out, x, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * 2 * size + at, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + at, inside, 0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + at, product.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate(positions, x, cos_sin, stride, HEAD: tl.constexpr, HALF: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    angles = cos_sin + tl.load(positions + row) * HEAD + at
    cos, sin = tl.load(angles).to(tl.float32), tl.load(angles + HALF).to(tl.float32)
    first = x + row * stride + tl.program_id(1) * HEAD + at
    a, b = tl.load(first).to(tl.float32), tl.load(first + HALF).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x.dtype.element_ty))
    tl.store(first + HALF, (b * cos + a * sin).to(x.dtype.element_ty))


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Make a device tensor of memory that it does not keep: a device's, or pinned memory."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    array = _Array(tensor, _INTEGERS[tensor.element_size()])
    return torch.as_tensor(array, device="cuda").view(tensor.dtype)


class _Array:
    """Memory of a tensor, as other libraries find it."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": name,
            "version": 3,
        }


def _gather_latents(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Gather latents of the tokens of some requests."""
    bounds, size = cu_seq_lens.tolist(), src_cache.shape[1]
    starts = [0] * (len(bounds) - 1) if seq_starts is None else seq_starts.tolist()
    for request, start in enumerate(starts):
        first, last = bounds[request : request + 2]
        at = torch.arange(start, start + last - first, device=src_cache.device)
        dst[first:last] = src_cache[block_table[request, at // size].long(), at % size]

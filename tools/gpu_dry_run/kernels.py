# SPDX-License-Identifier: Apache-2.0
"""Kernels on the device double: Triton's by its interpreter, FlashAttention's in plain PyTorch.

What a GPU can do at all is answered by its capability.

FlashAttention's stand-ins take what vLLM's Python hands to the compiled functions, by position, and
check what those check: dtypes, devices, dense last dims, shapes that fit one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from tools.gpu_dry_run.device import DeviceDouble, DeviceError
from tools.gpu_dry_run.seams import noted

# Of `torch.ops._C`: whether a GPU of a capability, as `DeviceCapability.to_int` has it, can do it.
_CAN: dict[str, Callable[[int], bool]] = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "cutlass_group_gemm_supported": lambda capability: capability in (90, 100),
}
# Of `torch.ops._C`: named by vLLM's passes of compilation when they are imported, called by no run.
_NAMED = (
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
    "fused_qk_norm_rope",
)
_library = torch.library.Library("_C", "FRAGMENT")


def install(double: DeviceDouble) -> None:
    """Have Triton, FlashAttention and vLLM's custom operations run on the double."""
    _install_triton(double)
    _install_custom_operations(double)
    kernels = {
        "_vllm_fa2_C": {"varlen_fwd": _varlen_fwd},
        "_vllm_fa3_C": {"fwd": _fwd, "get_scheduler_metadata": _scheduler_metadata},
        "_C_cache_ops": {"reshape_and_cache_flash": _reshape_and_cache_flash},
    }
    for namespace, functions in kernels.items():
        for name, function in functions.items():
            _put(namespace, name, _launching(double, f"{namespace}::{name}", function))
    for name in _NAMED:
        if not hasattr(torch.ops._C, name):
            _library.define(f"{name}(Tensor output) -> ()")
    for name, answer in {**_CAN, "weak_ref_tensor": torch.Tensor.detach}.items():
        _put("_C", name, answer)

    def cuda_view(tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor of the same memory, which has to be pinned."""
        if not double.is_pinned(tensor):
            raise DeviceError("only pinned memory is seen by the device")
        with torch._C.DisableTorchFunction():
            return double.mark(torch.from_numpy(tensor.numpy()))

    _put("_C", "get_cuda_view_from_cpu_tensor", cuda_view)


def replace_in_torch(double: DeviceDouble) -> None:
    """Put PyTorch in place of two of vLLM's Triton kernels.

    Triton's interpreter cannot run that of top-k and top-p. It runs attention, in
    `tests/engine/test_gpu_path.py`, and takes minutes for what the capture of graphs asks of it.
    """
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    in_torch = sampler.apply_top_k_top_p_pytorch
    sampler.apply_top_k_top_p_triton = noted("vLLM's Triton kernel of top-k and top-p", in_torch)
    of_vllm = signature(triton_attn.unified_attention)

    def unified_attention(**arguments: Any) -> None:
        of_vllm.bind(**arguments)
        double.launch("unified_attention", _unified_attention, (), arguments, returns=False)

    triton_attn.unified_attention = noted("vLLM's Triton attention", unified_attention)


def _unified_attention(**given: Any) -> None:
    """vLLM's Triton attention, of the arguments that choreographed engines give it."""
    _Batch(
        *(given[name] for name in ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k")),
        *(given[name] for name in ("block_table", "max_seqlen_q", "max_seqlen_k")),
        *(given[name] for name in ("softmax_scale", "causal", "window_size", "softcap")),
        *(given["alibi_slopes"], given["sinks"]),
        is_flash_attention=False,
    ).run()


def _put(namespace: str, name: str, operation: Callable[..., Any]) -> None:
    """Put a stand-in where vLLM finds an operation that CUDA builds have compiled."""
    whole = f"torch.ops.{namespace}.{name}"
    setattr(getattr(torch.ops, namespace), name, noted(whole, operation))


def _launching(double: DeviceDouble, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        return double.launch(name, kernel, args, kwargs)

    return launch


def _install_triton(double: DeviceDouble) -> None:
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        def kernel(*args: Any, **kwargs: Any) -> None:
            interpret(executor, *args, **kwargs)

        name = f"Triton kernel {executor.fn.__name__}"
        double.launch(name, kernel, args, kwargs, returns=False)

    GridExecutor.__call__ = launch
    tl.debug_barrier = lambda *args, **kwargs: None  # the interpreter runs one thread


def _install_custom_operations(double: DeviceDouble) -> None:
    """Have the double find vLLM's custom operations: to torch's dispatcher it is the host."""
    from vllm.utils import torch_utils

    register = torch_utils.direct_register_custom_op

    def register_and_note(op_name: str, op_func: Callable[..., Any], *args: Any, **kw: Any) -> None:
        register(op_name, op_func, *args, **kw)
        library = kw.get("target_lib") or torch_utils.vllm_lib
        double.implementations[f"{library.ns}::{op_name}"] = op_func

    torch_utils.direct_register_custom_op = register_and_note


# -- FlashAttention --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Paged attention of a batch, by FlashAttention or by vLLM's Triton kernel.

    Attributes:
        query, output: `[num_tokens, num_heads, head_size]`.
        keys, values: `[num_blocks, block_size, num_kv_heads, head_size]`, with any strides.
        query_start_loc: int32 `[num_reqs + 1]`.
        seq_lens: int32 `[num_reqs]`.
        block_table: int32 `[num_reqs, max_blocks]`.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    is_causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    is_flash_attention: bool = True

    def check(self) -> None:
        """Check what the kernel takes for granted, or checks itself.

        Raises:
            DeviceError: says what does not hold.
        """
        num_reqs = len(self.query_start_loc) - 1
        numbers = self.query, self.keys, self.values, self.output
        indices = self.query_start_loc, self.seq_lens, self.block_table
        checks = {
            "numbers of one dtype": len({tensor.dtype for tensor in numbers}) == 1,
            "16 bits": self.query.dtype.itemsize == 2 or not self.is_flash_attention,
            "int32 indices": all(tensor.dtype is torch.int32 for tensor in indices),
            "dense last dims": all(t.stride(-1) == 1 for t in (*numbers, *indices)),
            "an output like the query": self.output.shape == self.query.shape,
            "keys like values": self.keys.shape == self.values.shape,
            "heads in groups": self.query.shape[1] % self.keys.shape[2] == 0,
            "a length and a row of blocks for each request": len(self.seq_lens) == num_reqs
            and len(self.block_table) == num_reqs,
            "blocks of 16 tokens, or a multiple": self.keys.shape[1] % 16 == 0,
            "a head size of at most 256 that 8 divides": self.query.shape[2] <= 256
            and self.query.shape[2] % 8 == 0,
            "no query longer than said": int(self.query_start_loc.diff().max())
            <= self.max_query_len,
            "no sequence longer than said": int(self.seq_lens.max()) <= self.max_seq_len,
        }
        for what, holds in checks.items():
            if not holds:
                raise DeviceError(f"attention wants {what}")

    def run(self) -> torch.Tensor:
        """Write each request's attention, computed in float32, to the output.

        Returns:
            Log-sum-exps, float32 `[num_heads, num_tokens]`.
        """
        self.check()
        lse = torch.zeros(self.query.shape[1], self.query.shape[0])
        starts = self.query_start_loc.tolist()
        for request, num_keys in enumerate(self.seq_lens.tolist()):
            start, stop = starts[request], starts[request + 1]
            if stop > start and num_keys:
                output, found = self._attend(request, start, stop, num_keys)
                self.output[start:stop], lse[:, start:stop] = output, found
        return lse

    def _attend(
        self, request: int, start: int, stop: int, num_keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = self.keys.shape[1]
        blocks = self.block_table[request, : -(-num_keys // block_size)].long()
        keys, values = (
            x[blocks].flatten(0, 1)[:num_keys].float() for x in (self.keys, self.values)
        )
        group = self.query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        query = self.query[start:stop].float().transpose(0, 1)
        scores = query @ keys.transpose(1, 2) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        where = torch.arange(num_keys - (stop - start), num_keys)[:, None]
        distance = where - torch.arange(num_keys)
        if self.alibi_slopes is not None:
            scores -= self.alibi_slopes[:, None, None] * distance.abs()
        left, right = self.window
        hidden = (distance < 0) if self.is_causal else torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance > left) if left >= 0 else False
        hidden |= (-distance > right) if right >= 0 else False
        scores.masked_fill_(hidden, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(-1, len(where), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_keys]
        output = (weights @ values).transpose(0, 1).to(self.output.dtype)
        return output, scores.logsumexp(dim=-1)


def _varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any,
    leftpad_k: Any, block_table: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, return_softmax: bool,
    num_splits: int, gen: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention 2 over a paged cache."""
    window = window_size_left, window_size_right
    lse = _Batch(
        *(q, k, v, out, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, is_causal, window, softcap, alibi_slopes),
    ).run()
    return out, lse


def _fwd(
    q: Any, k: Any, v: Any, k_new: Any, v_new: Any, q_v: Any, out: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, page_table: Any, kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any,
    rotary_sin: Any, seqlens_rotary: Any, q_descale: Any, k_descale: Any, v_descale: Any,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, is_rotary_interleaved: bool, scheduler_metadata: Any, num_splits: int,
    pack_gqa: Any, sm_margin: int, s_aux: Any, cp_world_size: int, cp_rank: int,
    cp_tot_seqused_k: Any,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # fmt: skip
    """FlashAttention 3 over a paged cache."""
    num_reqs = len(cu_seqlens_q) - 1
    if scheduler_metadata is not None and len(scheduler_metadata) < num_reqs:
        raise DeviceError("the scheduler's metadata is of fewer requests")
    window = window_size_left, window_size_right
    lse = _Batch(
        *(q, k, v, out, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, is_causal, window, softcap, None, s_aux),
    ).run()
    return out, lse, None, None


def _scheduler_metadata(batch_size: int, *args: Any) -> torch.Tensor:
    """What FlashAttention 3 plans of a batch: as many numbers, without a meaning here."""
    return torch.zeros(batch_size + 1, dtype=torch.int32)


def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Store keys and values at their slots; rows without one are left out."""
    if slot_mapping.dtype is not torch.int64 or kv_cache_dtype != "auto":
        raise DeviceError(f"slots of {slot_mapping.dtype}, a cache of {kv_cache_dtype}")
    rows = (slot_mapping >= 0).nonzero()[:, 0]
    slots, block_size = slot_mapping[rows], key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // block_size, slots % block_size] = new[rows].to(cache.dtype)

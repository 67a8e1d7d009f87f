# SPDX-License-Identifier: Apache-2.0
"""Engines with keys and values in 8 bits on CPUs for which vLLM has no kernels of them.

vLLM's are for AVX-512 alone. Without them both modes of an engine are given the same: numbers are
stored by PyTorch, and all attention, that of ordinary requests included, is ours.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness.engine import runner_of

_FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def has_kernels() -> bool:
    """Return whether vLLM has kernels of such caches here."""
    return torch.cpu._is_avx512_supported()


def store_by_torch() -> None:
    """Have vLLM start such engines, and store numbers, without kernels; call before one starts."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    isa, metadata = cpu_attn._get_attn_isa, ops.cpu_attn_get_scheduler_metadata

    def attn_isa(
        dtype: torch.dtype, block_size: int, head_size: int, kv_cache_dtype: str = "auto"
    ) -> str:
        found: str = isa(dtype, block_size, head_size, "auto")
        return found

    def scheduler_metadata(*args: Any, **kwargs: Any) -> Any:
        return metadata(*args, **{**kwargs, "kv_cache_dtype": "auto"})

    cpu_attn._get_attn_isa = attn_isa
    ops.cpu_attn_get_scheduler_metadata = scheduler_metadata
    ops.cpu_attn_reshape_and_cache = _store


def attend_by_ours(llm: Any) -> None:
    """Have all batches of a started engine run by our operation, those of ordinary requests too."""
    runner_of(llm)._has_context = lambda step: True


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    *,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Store keys, which lie transposed in a block, and values; see vLLM's function."""
    fmt = _FORMATS[kv_cache_dtype]
    slots = slot_mapping[: len(key)]
    blocks, heads, block_size, head_size = key_cache.shape
    at, offsets = slots // block_size, slots % block_size
    keys = key_cache.view(blocks, heads, -1).view(blocks, heads, head_size, block_size)
    keys[at, :, :, offsets] = (key / k_scale).to(fmt).view(torch.uint8)
    value_cache[at, :, offsets] = (value / v_scale).to(fmt).view(torch.uint8)

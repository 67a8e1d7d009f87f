# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU kernels for KV caches in 8 bits, in plain PyTorch, where its own do not run.

vLLM 0.32.0 has them for AVX-512 alone; choreography reads such caches on any CPU. On CPUs without
AVX-512, tests put this in the place of vLLM's kernels: the store is written as `cpu_attn_fp8.hpp`
does it, bit by bit (compared with that source, compiled for AVX2: all bytes are equal), and
attention of ordinary requests by its definition.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Bits of the fraction, exponent bias.
_FIELDS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}


def truncated(numbers: torch.Tensor, scale: float, fmt: torch.dtype) -> torch.Tensor:
    """Bytes of float32 numbers over a scale as vLLM stores them: digits are left out, not rounded.

    What is too large becomes the largest number of the format, and what is no number, too.
    """
    fraction_bits, bias = _FIELDS[fmt]
    top = torch.finfo(fmt).max
    inverse = torch.tensor(1.0) / torch.tensor(scale, dtype=torch.float32)
    scaled = (numbers.float() * inverse).nan_to_num(top, top, -top).clamp(-top, top)
    _, exponent = torch.frexp(scaled.abs())
    digit = torch.ldexp(torch.ones_like(scaled), (exponent - 1).clamp(min=1 - bias) - fraction_bits)
    left = (scaled / digit).trunc() * digit
    return torch.where(scaled == 0.0, 0.0, left).to(fmt).view(torch.uint8)


def install_where_missing() -> None:
    """Put these kernels in place of vLLM's, for caches in 8 bits alone; once is enough."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    if torch.cpu._is_avx512_supported() or getattr(ops, "_fp8_in_torch", False):
        return
    ops._fp8_in_torch = True
    isa = cpu_attn._get_attn_isa

    def attn_isa(
        dtype: torch.dtype, block_size: int, head_size: int, kv_cache_dtype: str = "auto"
    ) -> str:
        found: str = isa(dtype, block_size, head_size, "auto")
        if kv_cache_dtype in _FORMATS and found != "vec":
            return isa(dtype, block_size, head_size, kv_cache_dtype)  # it refuses
        return found

    cpu_attn._get_attn_isa = attn_isa
    for name, replacement in (
        ("cpu_attn_get_scheduler_metadata", None),
        ("cpu_attn_reshape_and_cache", _store),
        ("cpu_attention_with_kv_cache", _attend),
    ):
        setattr(ops, name, _choosing(getattr(ops, name), replacement))


def _choosing(of_vllm: Any, replacement: Any) -> Any:
    """vLLM's function, but the replacement for caches in 8 bits; None: vLLM's as for others."""

    @wraps(of_vllm)
    def choose(*args: Any, kv_cache_dtype: str = "auto", **kwargs: Any) -> Any:
        if kv_cache_dtype not in _FORMATS:
            return of_vllm(*args, kv_cache_dtype=kv_cache_dtype, **kwargs)
        if replacement is None:
            return of_vllm(*args, kv_cache_dtype="auto", **kwargs)
        return replacement(*args, fmt=_FORMATS[kv_cache_dtype], **kwargs)

    return choose


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
    fmt: torch.dtype,
) -> None:
    """Caches are `[num_blocks, num_kv_heads, block_size, head_size]`, keys in them transposed."""
    slots = slot_mapping[: len(key)]
    key, value, slots = key[slots >= 0], value[slots >= 0], slots[slots >= 0]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    _transposed(key_cache)[blocks, :, :, offsets] = truncated(key, k_scale, fmt)
    value_cache[blocks, :, offsets] = truncated(value, v_scale, fmt)


def _transposed(key_cache: torch.Tensor) -> torch.Tensor:
    """Keys as they lie, `[num_blocks, num_kv_heads, head_size, block_size]`."""
    blocks, heads, block_size, head_size = key_cache.shape
    return key_cache.view(blocks, heads, block_size * head_size).view(
        blocks, heads, head_size, block_size
    )


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    *,
    k_scale: float,
    v_scale: float,
    fmt: torch.dtype,
) -> None:
    """Causal attention of ordinary requests, one after the other, in float32."""
    assert causal and dynamic_causal is None
    group = query.shape[1] // key_cache.shape[1]
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, stop = query_start_loc[r : r + 2].tolist()
        blocks = block_table[r, : -(-seq_len // key_cache.shape[2])].long()
        keys = _transposed(key_cache)[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len]
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        keys = keys.contiguous().view(fmt).float().repeat_interleave(group, 0) * k_scale
        values = values.contiguous().view(fmt).float().repeat_interleave(group, 0) * v_scale
        scores = scale * torch.einsum("qhd,hkd->hqk", query[start:stop].float(), keys)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(seq_len - (stop - start), seq_len)
        distance = own[:, None] - torch.arange(seq_len)[None]
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance
        hidden = distance < 0
        if sliding_window > 0:
            hidden = hidden | (distance >= sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if s_aux is not None:
            sinks = s_aux.float()[:, None, None].expand(-1, len(own), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        output[start:stop] = torch.einsum("hqk,hkd->qhd", weights, values).to(output.dtype)

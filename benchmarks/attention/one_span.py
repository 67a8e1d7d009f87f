# SPDX-License-Identifier: Apache-2.0
"""One span, read by our operation and by vLLM's CPU attention: the same tokens, the same cache.

vLLM's kernels of caches in 8 bits are for AVX-512 alone: elsewhere its side reads the same numbers
in the dtype of queries (`Shape.vllm_kv_cache_dtype`), which is four times as much of float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    QuantizedKV,
    SpanBatch,
    SpanPlan,
    span_attention,
)
from vllm_choreo.ops.layout import write_kv

# Query, KV cache, block table.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """One workload: num_reqs requests of q_len queries over kv_len tokens each, all of which are
    seen, or those in a sliding window. Latents (MLA) have values of another size.
    """

    num_reqs: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None
    value_size: int | None = None
    kv_cache_dtype: str = "auto"

    @property
    def layout(self) -> Layout:
        return Layout.KEYS_TRANSPOSED if self.value_size is None else Layout.LATENT

    @property
    def vllm_kv_cache_dtype(self) -> str:
        """Dtype of the cache that vLLM's side reads."""
        can_read = self.kv_cache_dtype not in FORMATS or torch.cpu._is_avx512_supported()
        return self.kv_cache_dtype if can_read else "auto"

    def label(self) -> str:
        kind = "decode" if self.q_len == 1 else "prefill"
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return (
            f"{kind:7} reqs={self.num_reqs:2} q={self.q_len:4} kv={self.kv_len:4} {heads:9} "
            f"block={self.block_size:3} {str(self.dtype).removeprefix('torch.'):8} "
            f"window={self.window or '-':<4} kv={self.kv_cache_dtype}"
        )


def make_inputs(s: Shape) -> Inputs:
    """Query, a filled cache and its block table, blocks in random order."""
    blocks = -(-s.kv_len // s.block_size)
    table = torch.randperm(s.num_reqs * blocks).view(s.num_reqs, blocks).to(torch.int32)
    width = 2 * s.head_size if s.value_size is None else s.head_size
    cache = torch.zeros(table.numel(), s.num_kv_heads, s.block_size, width, dtype=s.dtype)
    slots = torch.arange(table.numel() * s.block_size)
    for part in slots.split(8192):
        shape = (part.numel(), s.num_kv_heads, s.head_size)
        keys = torch.randn(shape).to(s.dtype)
        values = (
            torch.randn(shape).to(s.dtype) if s.value_size is None else keys[..., : s.value_size]
        )
        write_kv(cache, part, keys, values, s.layout)
    if s.kv_cache_dtype in FORMATS:
        cache = cache.to(FORMATS[s.kv_cache_dtype]).view(torch.uint8)
    query = torch.randn(s.num_reqs * s.q_len, s.num_heads, s.head_size).to(s.dtype)
    return query, cache, table


def make_ours(s: Shape, inputs: Inputs, output: torch.Tensor) -> Callable[[], None]:
    query, cache, table = inputs
    ints = partial(torch.tensor, dtype=torch.int32)
    starts = torch.arange(s.num_reqs + 1, dtype=torch.int32)
    batch = SpanBatch(
        query_start_loc=starts * s.q_len,
        block_table=table,
        span_start_loc=starts,
        first_slot=ints([0] * s.num_reqs),
        num_tokens=ints([s.kv_len] * s.num_reqs),
        stored_position=ints([0] * s.num_reqs),
        position_delta=ints([0] * s.num_reqs),
        block_size=s.block_size,
    )
    batch.validate(cache.shape[0])
    plan = SpanPlan(batch, cos_sin=None)
    quantized = QuantizedKV(FORMATS[s.kv_cache_dtype]) if s.kv_cache_dtype in FORMATS else None
    layer = LayerAttention(
        scale=s.head_size**-0.5, window=s.window, layout=s.layout, quantized=quantized,
        value_size=s.value_size,
    )  # fmt: skip
    return partial(span_attention, query, cache, output, plan, layer, impl="cpu")


def make_vllm(s: Shape, inputs: Inputs, output: torch.Tensor) -> Callable[[], None]:
    query, cache, table = inputs
    if s.vllm_kv_cache_dtype != s.kv_cache_dtype:
        cache = cache.view(FORMATS[s.kv_cache_dtype]).to(s.dtype)
    starts = torch.arange(s.num_reqs + 1, dtype=torch.int32) * s.q_len
    seq_lens = torch.full((s.num_reqs,), s.kv_len, dtype=torch.int32)
    if s.value_size is not None:
        rows, scale = cache.squeeze(1), s.head_size**-0.5
        decode = vllm_ops.mla_decode_kvcache_cpu
        return partial(decode, output, query, rows, scale, table, seq_lens)
    window = s.window or -1  # none
    isa = _get_attn_isa(s.dtype, s.block_size, s.head_size, s.vllm_kv_cache_dtype)
    metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=s.num_reqs,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_size,
        seq_lens=seq_lens,
        dtype=s.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=True,
        kv_cache_dtype=s.vllm_kv_cache_dtype,
    )
    view = cache.view(cache.shape[0], s.num_kv_heads, 2 * s.block_size, s.head_size)
    key_cache, value_cache = view.chunk(2, dim=2)
    return partial(
        vllm_ops.cpu_attention_with_kv_cache,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=s.head_size**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=window,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
        kv_cache_dtype=s.vllm_kv_cache_dtype,
    )


def seconds_per_call(
    call: Callable[[], None], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measure(
    s: Shape, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Compare the outputs, then time both sides in turn, ``rounds`` times."""
    torch.manual_seed(0)
    inputs = make_inputs(s)
    size = (*inputs[0].shape[:2], s.value_size or s.head_size)
    outputs = torch.empty(size, dtype=s.dtype), torch.zeros(size, dtype=s.dtype)
    ours = make_ours(s, inputs, outputs[0])
    theirs = make_vllm(s, inputs, outputs[1])
    ours()
    theirs()
    tolerance = TOLERANCE[s.dtype]
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)
    repeats = max(1, int(0.01 / max(seconds_per_call(theirs, 3), 1e-6)))
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        order = [ours, theirs] if i % 2 else [theirs, ours]
        result = [seconds_per_call(side, repeats, clock) for side in order]
        times.append((result[0], result[1]) if i % 2 else (result[1], result[0]))
    ratios = statistics.quantiles([a / b for a, b in times], n=4)
    sides = list(zip(*times, strict=True))
    ours_us, vllm_us = (1e6 * statistics.median(side) for side in sides)
    return {
        "ours_us": ours_us,
        "vllm_us": vllm_us,
        "ratio": ratios[1],
        "ratio_q1": ratios[0],
        "ratio_q3": ratios[2],
        "ratio_best": min(sides[0]) / min(sides[1]),
        "max_abs_difference": (outputs[0].float() - outputs[1].float()).abs().max().item(),
    }

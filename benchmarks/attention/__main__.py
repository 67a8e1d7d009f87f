# SPDX-License-Identifier: Apache-2.0
"""Time span_attention (C++) against vLLM's CPU attention: same tokens, same cache, one span.

    python -m benchmarks.attention [--csv out.csv] [--rounds 15]

Outputs are compared before anything is timed; the two sides run in turn. The ratio is the median
over rounds of (ours / vLLM's); `best` compares the fastest rounds, which is what remains
meaningful while other programs run (there use --threads 1). Run it twice, on an idle machine.
With --kv-cache-dtype fp8_e4m3 or fp8_e5m2 both read a cache in 8 bits; vLLM can on AVX-512 alone.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm
from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    QuantizedKV,
    SpanBatch,
    SpanPlan,
    span_attention,
)
from vllm_choreo.ops import cpu as choreo_cpu
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

    def label(self) -> str:
        kind = "decode" if self.q_len == 1 else "prefill"
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return (
            f"{kind:7} reqs={self.num_reqs:2} q={self.q_len:4} kv={self.kv_len:4} {heads:9} "
            f"block={self.block_size:3} {str(self.dtype).removeprefix('torch.'):8} "
            f"window={self.window or '-':<4} kv={self.kv_cache_dtype}"
        )


def all_shapes(
    dtypes: list[torch.dtype], block_sizes: list[int], kv_cache_dtype: str
) -> list[Shape]:
    work: list[tuple[int, int, int, int | None]]
    work = [(n, 1, kv, None) for kv in (512, 4096) for n in (1, 8, 16)]
    work += [(1, q, q, None) for q in (64, 256, 1024)]
    work += [(1, 256, 4096, None)]
    # Of gpt-oss and of Gemma 3.
    work += [(n, q, 4096, window) for window in (128, 512) for n, q in ((8, 1), (1, 256))]
    heads = [(9, 3, 64), (32, 8, 128)]
    # Of DeepSeek V2 Lite and of V3, in the blocks that vLLM's kernel takes; it decodes alone.
    latents = [
        Shape(n, 1, kv, num_heads, 1, 576, 16, dtype, value_size=512)
        for dtype in dtypes
        for num_heads in (16, 128)
        for n, kv in ((1, 512), (1, 4096), (8, 512), (8, 4096))
    ]
    dense = [
        Shape(n, q, kv, *h, block, dtype, window, kv_cache_dtype=kv_cache_dtype)
        for dtype in dtypes
        for block in block_sizes
        for h in heads
        for n, q, kv, window in work
    ]
    return dense + latents


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
    starts = torch.arange(s.num_reqs + 1, dtype=torch.int32) * s.q_len
    seq_lens = torch.full((s.num_reqs,), s.kv_len, dtype=torch.int32)
    if s.value_size is not None:
        rows, scale = cache.squeeze(1), s.head_size**-0.5
        decode = vllm_ops.mla_decode_kvcache_cpu
        return partial(decode, output, query, rows, scale, table, seq_lens)
    window = s.window or -1  # none
    isa = _get_attn_isa(s.dtype, s.block_size, s.head_size, s.kv_cache_dtype)
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
        kv_cache_dtype=s.kv_cache_dtype,
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
        kv_cache_dtype=s.kv_cache_dtype,
    )


def seconds_per_call(call: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measure(s: Shape, rounds: int) -> dict[str, Any]:
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
        result = [seconds_per_call(side, repeats) for side in order]
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


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "isa": choreo_cpu.available_isas()[0],
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bar", type=float, default=1.15, help="largest allowed median ratio")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[32])
    parser.add_argument("--kv-cache-dtype", choices=["auto", *FORMATS], default="auto")
    parser.add_argument("--match", default="", help="only shapes whose label contains this")
    parser.add_argument("--threads", type=int, help="torch's threads; all by default")
    parser.add_argument("--csv")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    current_platform.import_kernels()
    if (reason := choreo_cpu.unavailable_reason()) is not None:
        sys.exit(f"the C++ kernels are not built: {reason}")
    info = machine()
    print(info)
    rows = []
    dtypes = [getattr(torch, name) for name in args.dtypes]
    for s in all_shapes(dtypes, args.block_sizes, args.kv_cache_dtype):
        if args.match not in s.label():
            continue
        r = measure(s, args.rounds)
        rows.append({**vars(s), **r, **info})
        print(
            f"{s.label()} ours {r['ours_us']:9.1f} us  vllm {r['vllm_us']:9.1f} us  "
            f"ratio {r['ratio']:.2f} [{r['ratio_q1']:.2f}, {r['ratio_q3']:.2f}] "
            f"best {r['ratio_best']:.2f}"
            f"{'  ABOVE THE BAR' if r['ratio'] > args.bar else ''}",
            flush=True,
        )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return int(any(row["ratio"] > args.bar for row in rows))


if __name__ == "__main__":
    sys.exit(main())

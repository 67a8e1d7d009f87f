# SPDX-License-Identifier: Apache-2.0
"""Attention over messages that many calls read: together, each alone, and what planning costs.

    python -m benchmarks.bench_shared_reading [--rounds 9] [--passes 2]

No engine: `ops.span_attention` on caches of several layers, as large together as a model's, so that
a layer's keys and values are not left in the CPU's cache by the step before. Sides take turns, and
outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import command_line, machine, machine_line, read_csv, table, write_csv
from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.span_batcher import LayerKind, SpanBatcher, StepBatch
from vllm_choreo.ops import (
    LayerAttention,
    Rotation,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    span_attention,
)

BLOCK_SIZE = 32
MESSAGES = 8
CACHE_BYTES = 400e6  # of all layers together: many times the CPU's last cache
TOLERANCE = 2e-5
# Readers, tokens of all messages, query heads, KV heads, head size (SmolLM2-135M, Llama-3.1-8B).
SHAPES = [(n, 4000, *heads) for heads in ((9, 3, 64), (32, 8, 128)) for n in (2, 4, 8, 16, 32)]
PLANNED = (32, 16, 250)  # requests, spans of each, tokens of a span


@dataclass(frozen=True)
class Work:
    """One decode step of readers that see the same messages in two orders, at their own places."""

    query: torch.Tensor
    caches: list[torch.Tensor]
    batch: SpanBatch
    cos_sin: torch.Tensor


def make_work(readers: int, tokens: int, heads: int, kv_heads: int, size: int) -> Work:
    per_message = -(-tokens // MESSAGES // BLOCK_SIZE)
    num_blocks = MESSAGES * per_message + readers
    layer_bytes = num_blocks * kv_heads * BLOCK_SIZE * 2 * size * 4
    num_layers = max(2, round(CACHE_BYTES / layer_bytes))
    shape = (num_blocks, kv_heads, BLOCK_SIZE, 2 * size)
    rotation = Rotation(1e5 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size), True)
    batch = make_batch(readers, tokens // MESSAGES, per_message)
    return Work(
        query=torch.randn(readers, heads, size),
        caches=[torch.randn(shape) for _ in range(num_layers)],
        batch=batch,
        cos_sin=rotation.cos_sin(batch.position_delta),
    )


def make_batch(readers: int, message_tokens: int, per_message: int) -> SpanBatch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    columns: list[tuple[int, int, int, int]] = []
    rows = []
    own_slot = MESSAGES * per_message * BLOCK_SIZE
    for r in range(readers):
        order = list(range(MESSAGES))[:: 1 if r % 2 else -1]
        blocks = [m * per_message + k for m in order for k in range(per_message)]
        rows.append([*blocks, MESSAGES * per_message + r])
        for i in range(MESSAGES):
            columns.append((i * per_message * BLOCK_SIZE, message_tokens, 0, 7 * i + r))
        columns.append((own_slot, 5, own_slot, 0))
    first_slot, num_tokens, stored, delta = (ints(list(c)) for c in zip(*columns, strict=True))
    starts = torch.arange(readers + 1, dtype=torch.int32)
    return SpanBatch(
        starts, torch.tensor(rows, dtype=torch.int32), starts * (MESSAGES + 1), first_slot,
        num_tokens, stored, delta, BLOCK_SIZE,
    )  # fmt: skip


def measure(work: Work, rounds: int) -> dict[str, list[float]]:
    """Seconds per layer of each side, per round."""
    reads = plan_shared_reads(work.batch)
    plans = {
        "together": SpanPlan(work.batch, work.cos_sin, reads),
        "alone": SpanPlan(work.batch, work.cos_sin),
    }
    sides = tuple(plans)
    layer = LayerAttention(scale=work.query.shape[-1] ** -0.5)
    outputs = {name: torch.empty_like(work.query) for name in sides}

    def attend(name: str, cache: torch.Tensor) -> None:
        span_attention(work.query, cache, outputs[name], plans[name], layer)

    for cache in work.caches:
        for name in sides:
            attend(name, cache)
        torch.testing.assert_close(*outputs.values(), atol=TOLERANCE, rtol=TOLERANCE)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in sides:
            began = time.perf_counter()
            for cache in work.caches:
                attend(name, cache)
            seconds[name].append((time.perf_counter() - began) / len(work.caches))
    return seconds


def planning_times(rounds: int) -> dict[str, float]:
    """Median milliseconds for a batch of new requests, and for the same ones a step later."""
    num_reqs, num_spans, tokens = PLANNED
    per_span = -(-tokens // BLOCK_SIZE)
    base = num_spans * per_span * BLOCK_SIZE
    rotation = Rotation(1e5 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64), True)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    times: dict[str, list[float]] = {"new": [], "kept": []}
    for turn in range(rounds):
        order = torch.randperm(num_spans * per_span, dtype=torch.int32)
        own = torch.arange(num_reqs, dtype=torch.int32)[:, None] + order.numel()
        rows = torch.cat([order.expand(num_reqs, -1), own], dim=1).contiguous()
        batcher = SpanBatcher(BLOCK_SIZE, [LayerKind(rotation)])
        slots = tuple(i * per_span * BLOCK_SIZE for i in range(num_spans))
        names = [f"{turn}/{r}" for r in range(num_reqs)]
        batcher.update(
            {
                name: RequestSpans(
                    slots, (tokens,) * num_spans, (0,) * num_spans,
                    tuple(r + 3 * i for i in range(num_spans)), base,
                )
                for r, name in enumerate(names)
            },
            [],
        )  # fmt: skip
        for kind, grown in (("new", 5), ("kept", 6)):
            seq_lens = torch.full((num_reqs,), base + grown, dtype=torch.int32)
            began = time.perf_counter()
            batcher.batch(StepBatch(names, starts, seq_lens, rows))
            times[kind].append(1e3 * (time.perf_counter() - began))
    return {kind: statistics.median(found) for kind, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        for shape in SHAPES:
            rows.append({"pass": number, **_row(shape, args.rounds)})
            print(rows[-1], flush=True)
    record = {**machine(), "command": command_line("bench_shared_reading")}
    write_csv("shared_reading", rows, **record)
    plans = [{"pass": n, **planning_times(31)} for n in range(1, args.passes + 1)]
    write_csv("shared_reading_planning", plans, **record)
    print(section())
    return 0


def _row(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    readers, tokens, heads, kv_heads, size = shape
    seconds = measure(make_work(*shape), rounds)
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["together"], strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4)
    together = statistics.median(seconds["together"])
    return {
        "readers": readers,
        "tokens": tokens,
        "heads": f"{heads}/{kv_heads}x{size}",
        "alone_ms": round(1e3 * statistics.median(seconds["alone"]), 4),
        "together_ms": round(1e3 * together, 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_q1": round(first, 3),
        "ratio_q3": round(third, 3),
        "gflops": round(4e-9 * readers * heads * size * tokens / together, 1),
        "gb_s": round(8e-9 * tokens * kv_heads * size / together, 2),
    }


def _ratio(row: dict[str, str]) -> str:
    return f"{row['ratio']} [{row['ratio_q1']}, {row['ratio_q3']}]"


def section() -> str:
    """The part of RESULTS.md."""
    rows = read_csv("shared_reading")
    if not rows:
        return ""
    plans = read_csv("shared_reading_planning")
    num_reqs, num_spans, tokens = PLANNED
    keys = list(dict.fromkeys((row["heads"], row["readers"]) for row in rows))
    lines = []
    for heads, readers in keys:
        found = [r for r in rows if (r["heads"], r["readers"]) == (heads, readers)]
        first = found[0]
        lines.append(
            (f"{heads}, {readers} readers", first["alone_ms"], first["together_ms"],
             first["gflops"], first["gb_s"], *map(_ratio, found))
        )  # fmt: skip
    passes = [f"ratio, pass {row['pass']}" for row in plans]
    kept = ", ".join(f"{float(row['kept']):.3f}" for row in plans)
    new = ", ".join(f"{float(row['new']):.2f}" for row in plans)
    return "\n\n".join(
        [
            "## Reading shared messages once: the attention operation",
            "One decode step of readers of the same 8 messages, 4,000 tokens together, half of "
            "them in the reverse order, each at positions of its own; milliseconds per layer "
            "(first pass), float32. Ratio alone / together: median [quartiles].",
            table(
                ["query heads / KV heads x size", "alone", "together", "GFLOP/s together",
                 "GB/s together", *passes],
                lines,
            ),
            "Cost model: alone, keys and values pass the core once per reader; together once, and "
            "the time is that of the multiply-adds, 4 x readers x heads x size x tokens. The gain "
            "grows with what does not fit into the last cache (4,000 tokens of one layer: 6 MB at "
            "9/3x64, 33 MB at 32/8x128), since there each reader alone fetches it from memory.",
            f"Planning on the CPU for {num_reqs} requests with {num_spans} spans of {tokens} "
            f"tokens each: {new} ms in a step in which requests start or end (laying out, checking "
            f"and grouping together), {kept} ms in all others (passes in order). Decode steps of "
            f"32 readers of as many tokens are measured under scaling.",
            machine_line(rows),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Steps of readers of the same messages on `ops.span_attention`, and the planning of batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    QuantizedKV,
    Rotation,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    span_attention,
)

PLANNED = (32, 16, 250)  # requests, spans of each, tokens of a span
BLOCK_SIZE = 32
MESSAGES = 8
CACHE_BYTES = 400e6  # of all layers together: many times the CPU's last cache
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Work:
    """One decode step of readers that see the same messages in two orders, at their own places."""

    query: torch.Tensor
    caches: list[torch.Tensor]
    batch: SpanBatch
    cos_sin: torch.Tensor
    layer: LayerAttention


def make_work(
    readers: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int | None = None,
    fmt: torch.dtype | None = None,
) -> Work:
    """Make the work of a shape.

    Args:
        value_size: of latents (MLA), whose values are the beginnings of keys.
        fmt: of keys and values in 8 bits; None: they are float32.
    """
    per_message = -(-tokens // MESSAGES // BLOCK_SIZE)
    num_blocks = MESSAGES * per_message + readers
    width, rotary_dim = (2 * size, size) if value_size is None else (size, size - value_size)
    layer_bytes = num_blocks * kv_heads * BLOCK_SIZE * width * (1 if fmt else 4)
    num_layers = max(2, round(CACHE_BYTES / layer_bytes))
    shape = (num_blocks, kv_heads, BLOCK_SIZE, width)
    dims = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    rotation = Rotation(1e5 ** (-dims / rotary_dim), True)
    layout = Layout.KEYS_TRANSPOSED if value_size is None else Layout.LATENT
    batch = make_batch(readers, tokens // MESSAGES, per_message)
    caches = [torch.randn(shape) for _ in range(num_layers)]
    if fmt is not None:
        caches = [cache.to(fmt).view(torch.uint8) for cache in caches]
    return Work(
        query=torch.randn(readers, heads, size),
        caches=caches,
        batch=batch,
        cos_sin=rotation.cos_sin(batch.position_delta),
        layer=LayerAttention(
            scale=size**-0.5,
            layout=layout,
            quantized=None if fmt is None else QuantizedKV(fmt),
            value_size=value_size,
        ),
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


def measure(
    work: Work, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per layer of each side, per round."""
    reads = plan_shared_reads(work.batch)
    plans = {
        "together": SpanPlan(work.batch, work.cos_sin, reads),
        "alone": SpanPlan(work.batch, work.cos_sin),
    }
    sides = tuple(plans)
    size = (*work.query.shape[:2], work.layer.value_size or work.query.shape[2])
    outputs = {name: torch.empty(size) for name in sides}

    def attend(name: str, cache: torch.Tensor) -> None:
        span_attention(work.query, cache, outputs[name], plans[name], work.layer)

    for cache in work.caches:
        for name in sides:
            attend(name, cache)
        torch.testing.assert_close(*outputs.values(), atol=TOLERANCE, rtol=TOLERANCE)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in sides:
            began = clock()
            for cache in work.caches:
                attend(name, cache)
            seconds[name].append((clock() - began) / len(work.caches))
    return seconds


def in_turn_row(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds of both sides, and how many times as fast together is, round by round."""
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["together"], strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4)
    return {
        "alone_ms": round(1e3 * statistics.median(seconds["alone"]), 4),
        "together_ms": round(1e3 * statistics.median(seconds["together"]), 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_q1": round(first, 3),
        "ratio_q3": round(third, 3),
    }


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
        batcher = SpanBatcher(
            BLOCK_SIZE, [LayerKind(rotation, LayerShape(9, 3, 64, torch.float32), 1536)]
        )
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

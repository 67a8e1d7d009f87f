# SPDX-License-Identifier: Apache-2.0
"""Repositioning against the bandwidth of copies, and what planning and launching cost the host."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.gpu import oracle
from benchmarks.gpu.cases import Heads, Kind, Work, make_cache, make_inputs
from benchmarks.gpu.measure import Clock, Floors
from benchmarks.gpu.report import Bar, Report
from benchmarks.harness.stats import median, spread
from benchmarks.harness.tables import with_spread
from vllm_choreo.ops import Layout, reposition_keys

LLAMA = Heads(32, 8, 128)


def run(report: Report, args: argparse.Namespace, clock: Clock, floors: Floors) -> None:
    """Both; wrong outputs are errors of the report."""
    _reposition(report, args, clock, floors)
    _host(report, args, clock)


def _reposition(report: Report, args: argparse.Namespace, clock: Clock, floors: Floors) -> None:
    is_tiny = args.shapes == "tiny"
    columns = ("way", "blocks", "us", "q1_us", "q3_us", "bytes", "copy_part", "error", "seed")
    sheet = report.sheet("reposition", columns)
    kind = Kind(Heads(4, 2, 64) if is_tiny else LLAMA)
    heads = kind.heads
    token_bytes = heads.num_kv_heads * heads.head_size * kind.dtype.itemsize
    for num_moved in [4] if is_tiny else [500, 8000]:
        cache = make_cache(2 * num_moved, kind, report.device)
        blocks = torch.randperm(2 * num_moved, device=report.device).int()
        source, target = blocks[:num_moved], blocks[num_moved:]
        for way, destination in (("in place", source), ("copy", target)):
            call, error = _move(cache, source, destination, kind)
            if not error < 1e-2:
                report.error(f"reposition, {way}, {num_moved} blocks: not timed, error {error:.2e}")
                continue
            times = clock.in_turn({way: call}, args.repeats)[way]
            # Keys are read and written, and values too where they go elsewhere.
            moved = num_moved * kind.block_size * token_bytes * 2 * (1 if way == "in place" else 2)
            part = moved / median(times) / floors.copy_rate
            low, high = spread(times)
            sheet.add({
                "way": way, "blocks": num_moved, "us": 1e6 * median(times), "q1_us": 1e6 * low,
                "q3_us": 1e6 * high, "bytes": moved, "copy_part": part, "error": error,
                "seed": args.seed,
            })  # fmt: skip
            name = f"reposition {num_moved} blocks, {way}: part of copy bandwidth"
            if is_tiny or num_moved == 8000:
                report.bar(Bar(name, part, 0.7))
            else:
                report.say(f"{name} {part:.2f}")


def _move(
    cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor, kind: Kind
) -> tuple[Callable[[], None], float]:
    """A call that moves all blocks, and the error of the worst of some of them."""
    rotation = Kind(kind.heads, rotary_dim=kind.heads.head_size).rotation()
    deltas = torch.randint(-5000, 5000, (len(source),))
    cos_sin = rotation.cos_sin(deltas).to(cache.device)
    some = torch.randperm(len(source))[:16].tolist()
    before = cache[source[some].long()].double()

    def call() -> None:
        reposition_keys(cache, source, target, cos_sin, impl="triton", layout=Layout.SIDE_BY_SIDE)

    call()
    frequencies = rotation.inv_freq.to(cache.device)
    expected = before.clone()
    for i, move in enumerate(some):
        keys = before[i][..., : kind.heads.head_size]
        turned = oracle.turn(keys, int(deltas[move]) * frequencies, True)
        expected[i][..., : kind.heads.head_size] = turned
    return call, oracle.relative_error(cache[target[some].long()], expected)


def _host(report: Report, args: argparse.Namespace, clock: Clock) -> None:
    """Host time of one decode step of many requests with many spans."""
    is_tiny = args.shapes == "tiny"
    kind = Kind(Heads(4, 2, 64), rotary_dim=64) if is_tiny else Kind(LLAMA, rotary_dim=128)
    work = Work(2, 1, 40, 2, 5) if is_tiny else Work(32, 1, 8000, 16, 100)
    inputs = make_inputs(kind, work, args.seed, report.device)
    output = torch.empty_like(inputs.query)
    reads = inputs.reads()
    tiles = inputs.tiles(reads)
    own_tokens = tiles.own_tokens.clone()
    layer = inputs.ours(output, reads, tiles)
    repeats, batch = (2, 1) if is_tiny else (20, 20)
    calls: dict[str, Callable[[], object]] = {
        "with_own_tokens": lambda: tiles.with_own_tokens(own_tokens),
        "launches of one layer": layer,
        "plan_shared_reads": inputs.reads,
        "make_tiles": lambda: inputs.tiles(reads),
    }
    sheet = report.sheet("host", ("part", "requests", "spans", "us", "q1_us", "q3_us"))
    us: dict[str, list[float]] = {}
    for name, call in calls.items():
        us[name] = [1e6 * s for s in clock.host_seconds(call, repeats, batch)]
        low, high = spread(us[name])
        sheet.add({
            "part": name, "requests": work.num_reqs, "spans": work.num_spans,
            "us": median(us[name]), "q1_us": low, "q3_us": high,
        })  # fmt: skip
    times = ", ".join(f"{name} {with_spread(found)}" for name, found in us.items())
    report.note(f"host, {work.num_reqs} requests of {work.num_spans} spans, us: {times}")
    step = median(us["with_own_tokens"]) + median(us["launches of one layer"])
    name = f"host us per decode step and layer, {work.num_reqs} requests x {work.num_spans} spans"
    report.bar(Bar(name, step, 50.0, is_least=False))

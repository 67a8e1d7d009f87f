# SPDX-License-Identifier: Apache-2.0
"""Times of decode and prefill at the shapes of two models, beside others and beside the floors."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu import launching, oracle, rivals
from benchmarks.gpu.cases import Heads, Inputs, Kind, Work, make_inputs
from benchmarks.gpu.measure import Clock, Floors, measure_floors
from benchmarks.gpu.report import Bar, Report, Sheet
from benchmarks.harness.stats import median, spread
from vllm_choreo.ops import SharedReads
from vllm_choreo.ops.flash_prefills import FlashPrefills

MODELS = {"Llama-3.1-8B": Heads(32, 8, 128), "Qwen3-14B": Heads(40, 8, 128)}
SIDES = ("grouped", "ungrouped", "flash_prefills", "SDPA", "FlexAttention", "xformers")
# Of the worst query against float64; rivals read copies that are rounded once more.
TOLERANCE = {"grouped": 1e-2, "ungrouped": 1e-2, "flash_prefills": 1e-2}
RIVAL_TOLERANCE = 2e-2
COLUMNS = (
    "model", "kind", "requests", "queries", "shared_tokens", "spans", "own_tokens",
    *(f"{side}_{part}" for side in SIDES for part in ("us", "q1_us", "q3_us", "error")),
    "floor_us", "bound", "floor_part_grouped", "floor_part_ungrouped", "grouped_gain",
    "gain_on_SDPA", "gain_on_FlexAttention", "gain_on_xformers", "seed", "without",
)  # fmt: skip
# A floor below this is not reached by anything that has to start a kernel, microseconds.
LEAST_FLOOR_US = 20.0


def run(report: Report, args: argparse.Namespace) -> None:
    """Time everything; outputs that disagree are errors of the report."""
    clock = Clock(report.device)
    floors = measure_floors(clock, args.repeats)
    report.note(
        f"copy bandwidth {floors.copy_rate / 1e9:.0f} GB/s (read and written), bfloat16 products "
        f"{floors.multiply_rate / 1e12:.2f} Tflop/s"
    )
    is_tiny = args.shapes == "tiny"
    launching.run(report, args, clock, floors)
    sheet = report.sheet("attention", COLUMNS)
    timer = _Timer(report, sheet, clock, floors, args)
    models = {"tiny": Heads(4, 2, 64)} if is_tiny else MODELS
    rows = [
        row
        for work in (_tiny_works() if is_tiny else _works())
        for name, heads in models.items()
        if (row := timer.row(name, heads, work)) is not None
    ]
    _tabulate(report, rows)
    for bar in _bars(rows, models, (40 if is_tiny else 8000, 2 if is_tiny else 16)):
        report.bar(bar)


@dataclass(eq=False)
class Row:
    """Microseconds of every side that ran, outputs compared before."""

    model: str
    work: Work
    us: Mapping[str, list[float]]
    floor_us: float
    bound: str
    without: list[str]

    def middle(self, side: str) -> float | None:
        return median(self.us[side]) if side in self.us else None

    def gain(self, side: str, of: str = "ungrouped") -> float | None:
        """How many times longer a side takes than one of ours."""
        theirs, ours = self.middle(side), self.middle(of)
        return None if theirs is None or ours is None else theirs / ours

    def floor_part(self, side: str) -> float | None:
        found = self.middle(side)
        return None if found is None else self.floor_us / found

    @property
    def kind(self) -> str:
        return "decode" if self.work.q_len == 1 else "prefill"


class _Timer:
    def __init__(
        self,
        report: Report,
        sheet: Sheet,
        clock: Clock,
        floors: Floors,
        args: argparse.Namespace,
    ) -> None:
        self.report, self.sheet, self.clock = report, sheet, clock
        self.floors, self.args = floors, args
        self.rival_seconds = args.rival_seconds

    def row(self, model: str, heads: Heads, work: Work) -> Row | None:
        """Compare, then time, then write; None if outputs disagree or a kernel does not run."""
        try:
            return self._row(model, heads, work)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
            self.report.error(f"attention, {model} {_words(work)}: not timed, {found}")
            return None

    def _row(self, model: str, heads: Heads, work: Work) -> Row | None:
        # The interpreter has xformers' kernel multiply the bit patterns of bfloat16.
        dtype = torch.float16 if self.report.is_dry else torch.bfloat16
        kind = Kind(heads, dtype, rotary_dim=heads.head_size)
        inputs = make_inputs(kind, work, self.args.seed, self.report.device)
        sides, without = self._sides(inputs)
        label = f"{model} {_words(work)}"
        errors = _errors(inputs, sides)
        wrong = {s: e for s, e in errors.items() if not e < TOLERANCE.get(s, RIVAL_TOLERANCE)}
        if wrong:
            found = ", ".join(f"{side} {error:.2e}" for side, error in wrong.items())
            self.report.error(f"attention, {label}: not timed, errors {found}")
            return None
        seconds = self.clock.in_turn(sides, self.args.repeats)
        us = {side: [1e6 * s for s in times] for side, times in seconds.items()}
        row = Row(model, work, us, *_floor(heads, work, kind, self.floors), without)
        self.sheet.add({**_cells(row, errors), "seed": self.args.seed})
        times = "  ".join(f"{side} {row.middle(side):.0f}" for side in us)
        part = row.floor_part("grouped") or row.floor_part("ungrouped") or 0.0
        self.report.say(f"{label}: us {times}  floor {row.floor_us:.1f} ({part:.2f} reached)")
        for reason in without:
            self.report.say(f"  without {reason}")
        return row

    def _sides(self, inputs: Inputs) -> tuple[dict[str, rivals.Side], list[str]]:
        """What runs here, and the reasons of what does not."""
        copies = rivals.gather(inputs)
        reads = inputs.reads()
        shape = copies.query.shape
        sides: dict[str, rivals.Side] = {}
        if reads is not None:
            sides["grouped"] = _returning(inputs, reads, shape)
        sides["ungrouped"] = _returning(inputs, None, shape)
        without = []
        try:
            if (prefills := inputs.prefills()) is not None:
                sides["flash_prefills"] = _returning(inputs, None, shape, prefills)
        except ImportError as error:
            without.append(f"flash_prefills: {error}")
        makers: dict[str, Callable[[rivals.Copies], rivals.Side]] = {
            "SDPA": rivals.sdpa,
            "FlexAttention": rivals.flex,
            "xformers": rivals.xformers,
        }
        for name, make in makers.items():
            if self.rival_seconds <= 0 and name != "SDPA":
                without.append(f"{name}: the time for compiling is used up (--rival-seconds)")
                continue
            began = time.perf_counter()
            try:
                sides[name] = make(copies)
            except rivals.Unavailable as reason:
                without.append(str(reason))
            self.rival_seconds -= time.perf_counter() - began
        return sides, without


def _returning(
    inputs: Inputs,
    reads: SharedReads | None,
    shape: torch.Size,
    prefills: FlashPrefills | None = None,
) -> rivals.Side:
    """Our call as one that returns its outputs."""
    output = torch.full_like(inputs.query, float("nan"))
    call = inputs.ours(output, reads, prefills=prefills)

    def side() -> torch.Tensor:
        call()
        return output.view(shape)

    return side


def _errors(inputs: Inputs, sides: Mapping[str, rivals.Side]) -> dict[str, float]:
    """Of every side against float64, on some queries of each request."""
    q_len = inputs.work.q_len
    chosen = sorted({0, q_len - 1, *torch.randperm(q_len)[:30].tolist()})
    expected = oracle.attention(inputs, chosen)
    return {
        name: oracle.relative_error(side()[:, chosen], expected) for name, side in sides.items()
    }


def _floor(heads: Heads, work: Work, kind: Kind, floors: Floors) -> tuple[float, str]:
    """Microseconds that reading each token once, or the products, must take; and which it is."""
    own = work.own_tokens + work.q_len
    token_bytes = 2 * heads.num_kv_heads * heads.head_size * kind.dtype.itemsize
    queries = work.num_reqs * work.q_len
    row_bytes = 2 * heads.num_heads * heads.head_size * kind.dtype.itemsize
    num_bytes = (work.shared_tokens + work.num_reqs * own) * token_bytes + queries * row_bytes
    pairs = queries * (work.shared_tokens + work.own_tokens + (work.q_len + 1) / 2)
    operations = 4 * heads.num_heads * heads.head_size * pairs
    is_reading = num_bytes / floors.copy_rate >= operations / floors.multiply_rate
    return 1e6 * floors.seconds(num_bytes, operations), "reading" if is_reading else "products"


def _cells(row: Row, errors: Mapping[str, float]) -> dict[str, object]:
    cells: dict[str, object] = {
        "model": row.model, "kind": row.kind, "requests": row.work.num_reqs,
        "queries": row.work.q_len, "shared_tokens": row.work.shared_tokens,
        "spans": row.work.num_spans, "own_tokens": row.work.own_tokens,
        "floor_us": row.floor_us, "bound": row.bound,
        "floor_part_grouped": row.floor_part("grouped"),
        "floor_part_ungrouped": row.floor_part("ungrouped"),
        "grouped_gain": row.gain("ungrouped", of="grouped"),
        **{f"gain_on_{side}": row.gain(side) for side in SIDES[3:]},
        "without": "; ".join(row.without),
    }  # fmt: skip
    for side, times in row.us.items():
        low, high = spread(times)
        cells |= {f"{side}_us": median(times), f"{side}_q1_us": low, f"{side}_q3_us": high}
        cells[f"{side}_error"] = errors[side]
    return cells


def _tabulate(report: Report, rows: Sequence[Row]) -> None:
    """Medians in microseconds; the floor, and what part of it our faster way reaches."""
    lines = []
    for row in rows:
        times = (row.middle(side) for side in SIDES)
        part = row.floor_part("grouped") or row.floor_part("ungrouped") or 0.0
        cells = ["-" if us is None else f"{us:.1f}" for us in times]
        floor = (f"{row.floor_us:.1f}", row.bound, f"{part:.2f}")
        lines.append((f"{row.model}, {_words(row.work)}", *cells, *floor))
    head = ("attention, us", *SIDES, "floor", "bound by", "part of floor")
    report.table("Attention", head, lines)


def _words(work: Work) -> str:
    kind = "decode" if work.q_len == 1 else f"prefill {work.q_len}"
    return (
        f"{kind}, {work.num_reqs} requests, {work.shared_tokens} shared tokens in "
        f"{work.num_spans} spans, {work.own_tokens} own"
    )


def _bars(rows: list[Row], models: Mapping[str, Heads], readers: tuple[int, int]) -> Iterator[Bar]:
    """`readers`: shared tokens and requests of the rows that the first bar is about."""
    decode = [row for row in rows if row.kind == "decode"]
    for model in models:
        gains = [
            row.gain("ungrouped", of="grouped")
            for row in decode
            if row.model == model and (row.work.shared_tokens, row.work.num_reqs) == readers
        ]
        name = f"{model}: grouped decode of {readers[1]} readers of {readers[0]} tokens, gain"
        yield _worst(name, gains, 6.0, "no such row")
    parts = [
        row.floor_part("grouped") or row.floor_part("ungrouped")
        for row in decode
        if row.bound == "reading" and row.floor_us > LEAST_FLOOR_US
    ]
    yield _worst("decode, part of the copy floor above 20 us", parts, 0.6, "no floor above 20 us")
    for kind in ("decode", "prefill"):
        for side in ("xformers", "FlexAttention"):
            gains = [row.gain(side) for row in rows if row.kind == kind]
            reasons = {r for row in rows for r in row.without if r.startswith(side)}
            yield _worst(
                f"ungrouped {kind}: time of {side} / ours, worst row", gains, 1.0,
                "; ".join(sorted(reasons)),
            )  # fmt: skip


def _worst(name: str, values: list[float | None], bar: float, reason: str) -> Bar:
    found = [value for value in values if value is not None]
    return Bar(name, min(found) if found else None, bar, reason=reason)


def _works() -> list[Work]:
    """The rows that bars are about come first: a run may be cut off."""
    return [
        Work(16, 1, 8000, 8, 100),
        Work(16, 1, 32000, 32, 100),
        Work(64, 1, 8000, 16, 1000),
        Work(16, 1, 8000, 1, 100),
        Work(1, 1, 8000, 16, 100),
        Work(4, 64, 8000, 8, 0),
        Work(1, 512, 8000, 16, 0),
        Work(32, 1, 8000, 16, 400),
        Work(1, 1, 32000, 4, 100),
        Work(4, 1, 2000, 8, 200),
        Work(64, 1, 500, 4, 300),
        Work(64, 1, 4000, 32, 100),
        Work(16, 30, 4000, 8, 0),
        Work(1, 2048, 500, 1, 0),
        Work(1, 2048, 32000, 32, 0),
        Work(8, 1, 500, 1, 1000),
    ]


def _tiny_works() -> list[Work]:
    return [Work(2, 1, 40, 2, 5), Work(1, 1, 30, 1, 5), Work(2, 6, 40, 2, 5)]

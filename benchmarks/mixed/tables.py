# SPDX-License-Identifier: Apache-2.0
"""The tables of the mixed load: in batches, over HTTP, and step by step."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.tables import Cell, Rows, Table, Values, interval, over, spread, with_ends
from benchmarks.mixed.bars import P99_BAR, p99, p99_ratio, step_times, ttfts
from benchmarks.mixed.work import SIDES
from vllm_choreo.lab.study.stats import bootstrap_interval


def _rate(side: str) -> Cell:
    """Tokens per second of the ordinary requests, one value per turn."""

    def values(rows: Rows) -> list[float]:
        turns = {r["turn"]: float(r["tokens_per_s"]) for r in rows if r["side"] == side}
        return list(turns.values())

    return spread(values, ".0f")


def _p99(side: str) -> Cell:
    def ends(values: object) -> tuple[float, float]:
        return bootstrap_interval(values, p99)  # type: ignore[arg-type]

    return lambda rows: with_ends(ttfts(rows, side), p99, ends, ".0f")


def _load(file: str, where: str) -> Table:
    columns: dict[str, Cell] = {}
    for side in SIDES:
        columns[f"{side}, tokens/s"] = _rate(side)
        columns[f"ms, {side}"] = spread(partial(ttfts, side=side), ".0f")
        columns[f"p99, {side}"] = _p99(side)
    columns["ratio of p99"] = lambda rows: f"{p99_ratio(rows):.2f}"
    columns["bar"] = lambda rows: P99_BAR
    return Table(file, {f"pass, {where}": "pass"}, columns)


_OURS, _THEIRS = (partial(step_times, side=side) for side in SIDES)
_BOTH: tuple[Values, Values] = (_OURS, _THEIRS)
TABLES = {
    "mixed": _load("mixed", "in batches"),
    "mixed_steps": Table(
        "mixed_steps",
        {"batch": "batch"},
        {
            "with a choreographed call, ms": spread(_OURS, ".1f"),
            "with a cached prefix, ms": spread(_THEIRS, ".1f"),
            "ratio": interval(over(*_BOTH), ".3f"),
        },
    ),
    "server": _load("server", "over HTTP"),
}

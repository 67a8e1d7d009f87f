# SPDX-License-Identifier: Apache-2.0
"""The page of two checkouts, from its CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_interval, with_spread
from vllm_choreo.judge.stats import bootstrap_interval

THIS, OTHER = "this checkout", "the other one"
FIGURES = ("choreo", "baseline", "ordinary")  # what a child is asked
# Not slower: the ratio's interval holds 1, or its median lies above.
KINDS = {
    "ms to first token, choreographed": "other / this",
    "baseline / choreographed, to the first token": "this / other",
    "ordinary requests, tokens/s": "this / other",
}
Rows = Sequence[Mapping[str, Any]]


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("checkouts")
    if not rows:
        return ""
    num_passes = len(_passes(rows))
    lines = [
        (
            f"{kind} ({direction})",
            *(with_spread(_values(rows, kind, name), ".2f") for name in (THIS, OTHER)),
            with_interval(_ratios(rows, kind), ".3f"),
        )
        for kind, direction in KINDS.items()
    ]
    return "\n\n".join(
        [
            "## Two checkouts: is this one slower?",
            "A parallel debate of three agents (the calls after the first round) and a batch of "
            f"ordinary requests, in {num_passes} passes with a new process for each checkout, in "
            "turn: medians [quartiles] over the passes; ratio, above 1 this checkout is faster: "
            "median over the passes and 95% bootstrap interval. Bar: no interval lies below 1: "
            f"{'reached' if bars_reached(rows) else 'MISSED'}.",
            table(("what (ratio)", THIS, OTHER, "ratio"), lines),
            machine_line(rows),
        ]
    )


def bars_reached(rows: Rows) -> bool:
    """Whether nothing is slower than it was."""
    return all(bootstrap_interval(_ratios(rows, kind))[1] >= 1.0 for kind in KINDS)


def _passes(rows: Rows) -> list[Any]:
    return list(dict.fromkeys(row["pass"] for row in rows))


def _values(rows: Rows, kind: str, name: str) -> list[float]:
    """One per pass: the median of its turns."""
    return [
        median(_figure(row, kind) for row in rows if (row["pass"], row["checkout"]) == (n, name))
        for n in _passes(rows)
    ]


def _figure(row: Mapping[str, Any], kind: str) -> float:
    if kind.startswith("ms"):
        return 1e3 * float(row["ttft_s"])
    if kind.startswith("baseline"):
        return float(row["baseline_ttft_s"]) / float(row["ttft_s"])
    return float(row["tokens_per_s"])


def _ratios(rows: Rows, kind: str) -> list[float]:
    this, other = (_values(rows, kind, name) for name in (THIS, OTHER))
    is_time = KINDS[kind] == "other / this"
    return [b / a if is_time else a / b for a, b in zip(this, other, strict=True)]

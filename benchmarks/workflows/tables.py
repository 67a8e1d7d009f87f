# SPDX-License-Identifier: Apache-2.0
"""The tables of the workflows: on one engine, and the check against stock vLLM in processes."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Cell, Rows, Table, Values, interval, middle, of, only, over
from benchmarks.workflows.bars import BARS, REPAIRED_BARS

# The CSV files: sides on one engine, and each in a process of its own; answers of several lengths.
DECIDED, CHECK, LENGTHS = "workflows", "workflows_processes", "workflows_lengths"
_TTFT, _SECONDS = "ttft_mean_s", "seconds"


def _bar(which: int) -> Cell:
    return lambda rows: BARS[rows[0]["workflow"]][which]


def _gain(figure: str, side: str = "choreo") -> Values:
    """Baseline / another side, run by run."""
    return over(of(figure, side="baseline"), of(figure, side=side))


def _runs_against_stock(rows: Rows) -> Rows:
    """A row a run: choreographed, and stock vLLM at the block size that is faster by a figure."""
    stock = [side for side in dict.fromkeys(row["side"] for row in rows) if "stock" in side]
    found: list[dict[str, Any]] = []
    for workflow in BARS:
        theirs = {}
        for figure in (_TTFT, _SECONDS):
            by_side = [of(figure, workflow=workflow, side=side)(rows) for side in stock]
            theirs[figure] = min(by_side, key=median)
        for i, row in enumerate(only(workflow=workflow, side="choreo")(rows)):
            found.append({**row, **{f"stock {figure}": of_[i] for figure, of_ in theirs.items()}})
    return found


TABLES = {
    "workflows": Table(
        DECIDED,
        {"workflow": "workflow"},
        {
            "baseline, ms": middle(of(_TTFT, 1e3, side="baseline"), ".0f"),
            "choreographed, ms": middle(of(_TTFT, 1e3, side="choreo"), ".0f"),
            "ratio": interval(_gain(_TTFT), ".1f"),
            "bar": _bar(0),
            "baseline, s": middle(of(_SECONDS, side="baseline"), ".1f"),
            "choreographed, s": middle(of(_SECONDS, side="choreo"), ".1f"),
            "ratio, all": interval(_gain(_SECONDS), ".3f"),
            "bar, all": _bar(1),
            "repaired, ms": middle(of(_TTFT, 1e3, side="repaired"), ".0f"),
            "ratio, repaired": interval(_gain(_TTFT, "repaired"), ".1f"),
            "bar, repaired": lambda rows: REPAIRED_BARS[rows[0]["workflow"]],
        },
    ),
    "workflows_processes": Table(
        CHECK,
        {"workflow": "workflow", "pass": "pass"},
        {
            "stock, ms": middle(of(f"stock {_TTFT}", 1e3), ".0f"),
            "choreographed, ms": middle(of(_TTFT, 1e3), ".0f"),
            "ratio": interval(over(of(f"stock {_TTFT}"), of(_TTFT)), ".1f"),
            "stock, s": middle(of(f"stock {_SECONDS}"), ".1f"),
            "choreographed, s": middle(of(_SECONDS), ".1f"),
            "ratio, all": interval(over(of(f"stock {_SECONDS}"), of(_SECONDS)), ".3f"),
        },
        rows=_runs_against_stock,
    ),
    "workflows_lengths": Table(
        LENGTHS,
        {"workflow": "workflow", "answers, tokens": "longest_answer"},
        {
            "generated": middle(of("generated_tokens", side="choreo"), ",.0f"),
            "baseline, ms": middle(of(_TTFT, 1e3, side="baseline"), ".0f"),
            "choreographed, ms": middle(of(_TTFT, 1e3, side="choreo"), ".0f"),
            "ratio": interval(_gain(_TTFT), ".1f"),
            "baseline, s": middle(of(_SECONDS, side="baseline"), ".1f"),
            "choreographed, s": middle(of(_SECONDS, side="choreo"), ".1f"),
            "ratio, all": interval(_gain(_SECONDS), ".3f"),
        },
    ),
}  # fmt: skip

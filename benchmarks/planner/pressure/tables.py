# SPDX-License-Identifier: Apache-2.0
"""The tables of orders in pools of several sizes."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.tables import Cell, Row, Rows, Table, of, only, spread, text

NAME, WIDE, COURSE = "planner_pressure", "planner_wide", "planner_course"
WAYS = (
    *("query by query", "operator by operator", "random", "as they come"),
    *("longest shared prefix", "an agent at a time", "gangs by prefix"),
    *("plan", "plan, most pending", "plan, in blocks"),
)


def _batch(row: Row) -> str:
    return f"{row['workflow']}, {row['queries']}, pool {row['pool']}"


def _both(way: str) -> Cell:
    """Seconds, and the percentage of prompt tokens that was found."""

    def cell(rows: Rows) -> str:
        found = [row for row in rows if row["way"] == way]
        return ", ".join(f"{float(r['seconds']):.1f} ({_percent(r['hit_rate'])})" for r in found)

    return cell


def _percent(share: str) -> str:
    return f"{100 * float(share):.0f}"


# Of the paper's Tables 5 and 8 and its Figure 9: the workflow, and the engine.
_PAPERS = {"workflow": "trading", "machine": "8B, one H100"}
_TIGHT = 0.5  # the pool of the table of strategies
_OURS = "plan, in blocks"


def _strategies(rows: Rows) -> dict[str, Cell]:
    """Seconds and hits of each way, and both against those of the plan in blocks."""
    (seconds,), (hits,) = of("seconds", way=_OURS)(rows), of("hit_rate", 100, way=_OURS)(rows)
    return {
        "seconds": lambda found: f"{float(found[0]['seconds']):.1f}",
        "this / plan, in blocks": lambda found: f"{float(found[0]['seconds']) / seconds:.2f}",
        "found, %": lambda found: f"{100 * float(found[0]['hit_rate']):.1f}",
        "against the plan's": lambda found: f"{_relative(found[0], hits):+.1f} %",
        "calls at a time": text("batch"),
    }


def _relative(row: Row, hits: float) -> float:
    """Percent by which a way finds more than the plan in blocks."""
    return 100 * (100 * float(row["hit_rate"]) - hits) / hits


def _papers(**where: object) -> Callable[[Rows], Rows]:
    return only(**_PAPERS, **where)


def _course(column: str, form: str) -> Callable[[Rows], dict[str, Cell]]:
    """A column for each part of the time."""

    def columns(rows: Rows) -> dict[str, Cell]:
        parts = sorted({int(row["part"]) for row in rows})
        return {
            f"to {100 * (part + 1) // len(parts)} %": spread(of(column, part=part), form)
            for part in parts
        }

    return columns


TABLES = {
    "planner_strategies": Table(WIDE, {"order": "way"}, _strategies, rows=_papers(pool=_TIGHT)),
    "planner_memory": Table(
        WIDE,
        {"seconds (% found) in a KV cache of": lambda row: f"{float(row['pool']):.0%}"},
        {way: _both(way) for way in WAYS},
        rows=_papers(),
    ),
    WIDE: Table(
        WIDE,
        {"seconds (% found)": _batch, "machine": "machine"},
        {way: _both(way) for way in WAYS},
    ),
    f"{COURSE}_calls": Table(
        COURSE,
        {"calls in a batch": "way"},
        _course("batch", ".1f"),
        rows=_papers(),
    ),
    f"{COURSE}_tokens": Table(
        COURSE,
        {"tokens of a batch": "way"},
        _course("batch_tokens", ",.0f"),
        rows=_papers(),
    ),
    NAME: Table(
        NAME,
        {"seconds (% of prompt tokens found)": _batch, "machine": "machine"},
        {
            "best order": lambda rows: f"({_percent(rows[0]['best_hit_rate'])})",
            **{way: _both(way) for way in WAYS},
        },
    ),
    "planner_batches": Table(
        NAME,
        {"calls at a time": _batch, "machine": "machine"},
        {way: spread(of("batch", way=way), ".1f") for way in WAYS},
    ),
    "planner_batch_tokens": Table(
        NAME,
        {"KV cache of the calls that run, tokens": _batch, "machine": "machine"},
        {way: spread(of("batch_tokens", way=way), ",.0f") for way in WAYS},
    ),
}

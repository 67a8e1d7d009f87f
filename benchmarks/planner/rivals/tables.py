# SPDX-License-Identifier: Apache-2.0
"""The tables of plans and their rivals: batches, what parts of a plan bring, and other sizes."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, of, ratio, spread

NAME, SWEEP, POOLS = "planner_rivals", "planner_sweep", "planner_small_pool"
_EXACT, _CHOREO = "plan, exact, messages", "plan, choreographed"
_PARTS = "without "


def _seconds(way: str) -> Cell:
    return spread(of("seconds", way=way), ".1f")


def _times(rival: str, way: str) -> Cell:
    return ratio(of("seconds", way=rival), of("seconds", way=way), ".3f")


def _hits(rows: Rows) -> list[float]:
    return [100 * (1 - float(row["encoded"]) / float(row["prompt"])) for row in rows]


def _batch(row: Row) -> str:
    return f"{row['workflow']}, {row['queries']}{', one process' * (row['one_process'] == 'True')}"


def _without_parts(rows: Rows) -> Rows:
    """The choreographed plan and those that lack a part, of batches that were run with them."""
    have = {_batch(row) for row in rows if row["way"].startswith(_PARTS)}
    return [
        row
        for row in rows
        if _batch(row) in have and (row["way"].startswith(_PARTS) or row["way"] == _CHOREO)
    ]


TABLES = {
    "planner_rivals": Table(
        NAME,
        {"seconds of": _batch},
        {
            "query by query": _seconds("query by query"),
            "operator by operator": _seconds("operator by operator"),
            "LangGraph, in process": _seconds("LangGraph, in process"),
            "LangGraph": _seconds("LangGraph"),
            _EXACT: _seconds(_EXACT),
            _CHOREO: _seconds(_CHOREO),
            "LangGraph / exact": _times("LangGraph", _EXACT),
            "LangGraph / choreo": _times("LangGraph", _CHOREO),
            "operators / choreo": _times("operator by operator", _CHOREO),
            "queries / choreo": _times("query by query", _CHOREO),
        },
    ),
    "planner_parts": Table(
        NAME,
        {"batch": _batch, "plan": "way"},
        {"s": spread(of("seconds"), ".1f")},
        rows=_without_parts,
    ),
    POOLS: Table(
        POOLS,
        {"batch": _batch, "KV cache, tokens": "pool", "way": "way"},
        {
            "s": spread(of("seconds"), ".1f"),
            "prompt tokens found, %": spread(_hits, ".0f"),
        },
    ),
    "planner_sweep": Table(
        SWEEP,
        {"trading": "workflow"},
        {
            **{f"{way}, s": _seconds(way) for way in ("LangGraph", _EXACT, _CHOREO)},
            "LangGraph / exact": _times("LangGraph", _EXACT),
            "LangGraph / choreo": _times("LangGraph", _CHOREO),
        },
    ),
}

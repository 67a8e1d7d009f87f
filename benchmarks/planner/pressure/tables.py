# SPDX-License-Identifier: Apache-2.0
"""The tables of orders in pools of several sizes."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, of, spread

NAME = "planner_pressure"
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


TABLES = {
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

# SPDX-License-Identifier: Apache-2.0
"""The tables of what choreographed plans change."""

from __future__ import annotations

from benchmarks.harness.tables import Row, Rows, Table, mean, of

NAME, FREE = "planner_agreement", "planner_results"


def _batch(row: Row) -> str:
    return f"{row['workflow']}, {row['queries']}"


def _never_differs(rows: Rows) -> str:
    return f"{sum(row['first'] == row['tokens'] for row in rows)} of {len(rows)}"


def _inexact(rows: Rows) -> Rows:
    return [row for row in rows if row["exact"] == "False"]


TABLES = {
    "planner_agreement": Table(
        NAME,
        {"calls that read messages": _batch, "plan": "way"},
        {
            "calls": lambda rows: str(len(rows)),
            "KL, nats per token": mean(of("kl"), ".2g"),
            "same likeliest token": mean(of("top1"), ".3f"),
            "none differs": _never_differs,
        },
        rows=_inexact,
    ),
    "planner_results": Table(
        FREE,
        {"results": _batch, "plan": "way"},
        {
            "same as the text's": lambda rows: (
                f"{sum(row['same'] == '1' for row in rows)} of {len(rows)}"
            ),
            "words before one differs": mean(of("alike"), ".1f"),
        },
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""The tables of plans on several workers, and of schedules against the optimum."""

from __future__ import annotations

from benchmarks.harness.tables import Table, middle, of, ratio, spread, text

NAME, OPTIMA = "planner_workers", "planner_optima"
_ORDERS = (
    *("query by query", "operator by operator", "random", "longest shared prefix", "planner"),
)
COUNTS = (1, 2)


def _name(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


TABLES = {
    OPTIMA: Table(
        OPTIMA,
        {"% above the optimum": "case"},
        {
            **{way: middle(of("gap", way=way), ".1f") for way in _ORDERS},
            "proven": text("proven"),
        },
    ),
    NAME: Table(
        NAME,
        {"workflow": "workflow", "semantics": "semantics"},
        {
            **{f"{_name(n)}, s": spread(of("seconds", workers=n), ".1f") for n in COUNTS},
            "1 / 2": ratio(of("seconds", workers=1), of("seconds", workers=2), ".2f"),
            **{f"encoded by {n}": middle(of("encoded", workers=n), ",.0f") for n in COUNTS},
        },
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""The table of plans on several workers."""

from __future__ import annotations

from benchmarks.harness.tables import Table, middle, of, ratio, spread

NAME = "planner_workers"
COUNTS = (1, 2)


def _name(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


TABLES = {
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

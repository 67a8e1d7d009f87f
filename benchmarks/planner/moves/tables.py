# SPDX-License-Identifier: Apache-2.0
"""The table of moves."""

from __future__ import annotations

from benchmarks.harness.tables import Table, of, ratio, spread

NAME = "planner_moves"
MOVED, ENCODED = "moved", "encoded again"
TABLES = {
    NAME: Table(
        NAME,
        {"tokens": "tokens"},
        {
            "moved, ms": spread(of("seconds", 1e3, way=MOVED), ".0f"),
            "encoded again, ms": spread(of("seconds", 1e3, way=ENCODED), ".0f"),
            "encoded again / moved": ratio(
                of("seconds", way=ENCODED), of("seconds", way=MOVED), ".2f"
            ),
        },
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""The section on plans on several workers."""

from __future__ import annotations

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

NAME = "planner_workers"
COUNTS = (1, 2)
SEMANTICS = ("exact", "choreo")


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    lines = []
    for name, semantics in dict.fromkeys((row["workflow"], row["semantics"]) for row in rows):
        same = [r for r in rows if (r["workflow"], r["semantics"]) == (name, semantics)]
        of_each = [[row for row in same if row["workers"] == str(count)] for count in COUNTS]
        seconds = [[float(row["seconds"]) for row in found] for found in of_each]
        encoded = [f"{median(float(row['encoded']) for row in found):,.0f}" for found in of_each]
        ratio = f"{median(seconds[0]) / median(seconds[1]):.2f}×"
        times = (with_spread(one, ".1f") for one in seconds)
        lines.append([name, semantics, *times, ratio, *encoded])
    head = ["workflow", "semantics", "1 worker", "2 workers", "1 / 2", "encoded by 1", "by 2"]
    return "\n\n".join(
        [
            "## Plans on several workers",
            "Seconds for a batch on one Ray worker that has all cores and on two that have half of "
            "them each; tokens that were encoded. Exact plans say the same (checked).",
            table(head, lines),
            machine_line(rows),
        ]
    )

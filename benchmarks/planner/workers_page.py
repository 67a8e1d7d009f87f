# SPDX-License-Identifier: Apache-2.0
"""The section on plans on several workers."""

from __future__ import annotations

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

NAME = "planner_workers"
COUNTS = (1, 2)


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    lines = []
    for name in dict.fromkeys(row["workflow"] for row in rows):
        of_each = [
            [row for row in rows if (row["workflow"], row["workers"]) == (name, str(count))]
            for count in COUNTS
        ]
        seconds = [[float(row["seconds"]) for row in found] for found in of_each]
        encoded = [f"{median(float(row['encoded']) for row in found):,.0f}" for found in of_each]
        ratio = f"{median(seconds[0]) / median(seconds[1]):.2f}×"
        lines.append([name, *(with_spread(one, ".1f") for one in seconds), ratio, *encoded])
    return "\n\n".join(
        [
            "## Plans on several workers",
            "Seconds for a batch, choreographed, on one Ray worker that has all cores and on two "
            "that have half of them each; tokens that were encoded. All say the same (checked).",
            table(["workflow", "1 worker", "2 workers", "1 / 2", "encoded by 1", "by 2"], lines),
            machine_line(rows),
        ]
    )

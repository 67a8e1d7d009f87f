# SPDX-License-Identifier: Apache-2.0
"""The bars of the sweep, for the best cell of each kind of voters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median

# Ratio of the best cell, at least.
BARS = {"identical voters": 2.2, "voters with roles": 4.0}
Rows = Sequence[Mapping[str, Any]]
Cell = tuple[int, int]  # candidates, voters


def bars_reached(rows: Rows) -> bool:
    """Check whether the best cell of either kind is good enough."""
    return all(
        max(cells.values()) >= bar for kind, bar in BARS.items() if (cells := ratios(rows, kind))
    )


def ratios(rows: Rows, kind: str) -> dict[Cell, float]:
    """Rival / choreographed, median of the runs, by (candidates, voters)."""
    cells: dict[Cell, list[float]] = {}
    for row in rows:
        if row["kind"] == kind:
            cell = (int(row["candidates"]), int(row["voters"]))
            cells.setdefault(cell, []).append(float(row["stock_s"]) / float(row["choreo_s"]))
    return {cell: median(values) for cell, values in cells.items()}

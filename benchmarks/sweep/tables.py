# SPDX-License-Identifier: Apache-2.0
"""The table of the sweep: a line for each number of candidates."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.tables import Cell, Rows, Table, interval, of, over
from benchmarks.sweep.bars import BARS


def _columns(rows: Rows) -> Mapping[str, Cell]:
    """Columns for the numbers of voters that were measured."""
    voters = sorted({int(row["voters"]) for row in rows})
    return {f"{count} {kind}": _ratio(kind, count) for kind in BARS for count in voters}


def _ratio(kind: str, voters: int) -> Cell:
    rival, ours = (of(f"{s}_s", kind=kind, voters=voters) for s in ("stock", "choreo"))
    return interval(over(rival, ours), ".2f")


TABLES = {"sweep": Table("sweep", {"candidates": "candidates"}, _columns)}

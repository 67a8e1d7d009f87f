# SPDX-License-Identifier: Apache-2.0
"""The table of two checkouts."""

from __future__ import annotations

from benchmarks.checkouts.bars import KINDS, OTHER, THIS, ratios, values
from benchmarks.harness.tables import Rows, Table, interval, of, spread


def _by_kind(rows: Rows) -> Rows:
    """A row for each kind of figure and pass."""
    return [
        {"kind": f"{kind} ({direction})", THIS: this, OTHER: other, "ratio": ratio}
        for kind, direction in KINDS.items()
        for this, other, ratio in zip(
            values(rows, kind, THIS), values(rows, kind, OTHER), ratios(rows, kind), strict=True
        )
    ]


TABLES = {
    "checkouts": Table(
        "checkouts",
        {"figure (ratio)": "kind"},
        {
            THIS: spread(of(THIS), ".2f"),
            OTHER: spread(of(OTHER), ".2f"),
            "ratio": interval(of("ratio"), ".3f"),
        },
        rows=_by_kind,
    ),
}

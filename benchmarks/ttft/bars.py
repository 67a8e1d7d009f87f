# SPDX-License-Identifier: Apache-2.0
"""The bar of the time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median

BAR = 12.0  # ratio of the medians of rounds 2 and 3, baseline / choreo
MODES = ("baseline", "choreo")
Rows = Sequence[Mapping[str, Any]]


def bar_reached(rows: Rows) -> bool:
    """Check whether calls after round 1 are as much faster as they should be, in every pass."""
    passes = dict.fromkeys(row["pass"] for row in rows)
    return all(
        median(ttfts(rows, "baseline", number)) / median(ttfts(rows, "choreo", number)) >= BAR
        for number in passes
    )


def ttfts(rows: Rows, mode: str, number: Any = None, rep: Any = None) -> list[float]:
    """Seconds to first token of the calls after round 1."""
    return [
        float(row["ttft_s"])
        for row in rows
        if row["mode"] == mode
        and row["stage"] != "round 1"
        and number in (None, row["pass"])
        and rep in (None, row["rep"])
    ]

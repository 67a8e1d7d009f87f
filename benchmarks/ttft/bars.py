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


def bar_of_engines_reached(rows: Rows) -> bool:
    """Check whether choreography gains on every engine what it gains on the dense one, or more."""
    gains = {name: _gain([row for row in rows if row["engine"] == name]) for name in _engines(rows)}
    return all(gain >= gains["dense"] for gain in gains.values())


def _engines(rows: Rows) -> list[str]:
    return [*dict.fromkeys(row["engine"] for row in rows)]


def _gain(rows: Rows) -> float:
    return median(ttfts(rows, "baseline")) / median(ttfts(rows, "choreo"))

# SPDX-License-Identifier: Apache-2.0
"""The bar of repositioned messages: what they add to a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median

SHARE_BAR = 0.03  # of a decode step, that a repositioned message may add
Rows = Sequence[Mapping[str, Any]]


def shares(rows: Rows, readers: int, number: Any = None) -> list[float]:
    """Shares per pair: what the repositioned side takes more, by what the other takes."""
    seconds: dict[tuple[Any, Any], dict[str, float]] = {}
    for row in rows:
        if int(row["readers"]) == readers and number in (None, row["pass"]):
            pair = seconds.setdefault((row["pass"], row["pair"]), {})
            pair[row["side"]] = float(row["step_s"])
    return [pair["repositioned"] / pair["own"] - 1 for pair in seconds.values()]


def added_share(rows: Rows, readers: int, number: Any = None) -> float:
    """The median over pairs; of one pass, or of all."""
    return median(shares(rows, readers, number))


def bar_reached(rows: Rows) -> bool:
    """Check that a repositioned message costs as little as it should, however many read."""
    return all(
        added_share(rows, readers) <= SHARE_BAR for readers in {int(row["readers"]) for row in rows}
    )

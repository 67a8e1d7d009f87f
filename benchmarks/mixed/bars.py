# SPDX-License-Identifier: Apache-2.0
"""The bar of the mixed load, in batches and over HTTP, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median, percentile
from benchmarks.mixed.work import SIDES

P99_BAR = 1.1  # time to first token of ordinary requests, choreographed / cached prefix
Rows = Sequence[Mapping[str, Any]]


def ttfts(rows: Rows, side: str) -> list[float]:
    """Milliseconds."""
    return [1e3 * float(row["ttft_s"]) for row in rows if row["side"] == side]


def p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


def p99_ratio(rows: Rows) -> float:
    """Ratio of the p99 beside choreographed calls and beside a cached prefix."""
    ours, theirs = (p99(ttfts(rows, side)) for side in SIDES)
    return ours / theirs


def bar_reached(rows: Rows) -> bool:
    """Check whether ordinary requests wait as little as they should, in every pass."""
    passes = dict.fromkeys(row["pass"] for row in rows)
    return all(p99_ratio([r for r in rows if r["pass"] == n]) <= P99_BAR for n in passes)


def in_words(rows: Rows) -> str:
    """The p99 so far."""
    return ", ".join(f"{side} p99 {p99(ttfts(rows, side)):.0f} ms" for side in SIDES)


def step_times(steps: Rows, side: str) -> list[float]:
    """Milliseconds."""
    return [1e3 * float(row["step_s"]) for row in steps if row["side"] == side]


def steps_in_words(steps: Rows, batch: str) -> str:
    """Medians of both sides."""
    found = [row for row in steps if row["batch"] == batch]
    return ", ".join(f"{side} {median(step_times(found, side)):.1f} ms" for side in SIDES)

# SPDX-License-Identifier: Apache-2.0
"""The bar of two checkouts: nothing is slower than it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median
from vllm_choreo.lab.study.stats import bootstrap_interval

THIS, OTHER = "this checkout", "the other one"
FIGURES = ("choreo", "baseline", "ordinary")  # what a child is asked
# Not slower: the ratio's interval holds 1, or its median lies above.
KINDS = {
    "ms to first token, choreographed": "other / this",
    "baseline / choreographed, to the first token": "this / other",
    "ordinary requests, tokens/s": "this / other",
}
Rows = Sequence[Mapping[str, Any]]


def bars_reached(rows: Rows) -> bool:
    """Check whether nothing is slower than it was."""
    return all(bootstrap_interval(ratios(rows, kind))[1] >= 1.0 for kind in KINDS)


def values(rows: Rows, kind: str, name: str) -> list[float]:
    """The figure of each pass: the median of its turns."""
    return [
        median(_figure(row, kind) for row in rows if (row["pass"], row["checkout"]) == (n, name))
        for n in dict.fromkeys(row["pass"] for row in rows)
    ]


def _figure(row: Mapping[str, Any], kind: str) -> float:
    if kind.startswith("ms"):
        return 1e3 * float(row["ttft_s"])
    if kind.startswith("baseline"):
        return float(row["baseline_ttft_s"]) / float(row["ttft_s"])
    return float(row["tokens_per_s"])


def ratios(rows: Rows, kind: str) -> list[float]:
    """Ratios per pass; above 1 this checkout is faster."""
    this, other = (values(rows, kind, name) for name in (THIS, OTHER))
    is_time = KINDS[kind] == "other / this"
    return [b / a if is_time else a / b for a, b in zip(this, other, strict=True)]

# SPDX-License-Identifier: Apache-2.0
"""The bar of ordinary requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Values, of, over

BAR = 0.98  # throughput with the plugin / without it, at the same block size
Rows = Sequence[Mapping[str, Any]]


def against(rival: str) -> Values:
    """Throughput with the plugin / the rival's in the same turn."""
    return over(of("tokens_per_s", side="plugin"), of("tokens_per_s", side=rival))


def bar_reached(rows: Rows) -> bool:
    """Check whether the plugin costs as little as it should, in the median of the passes."""
    passes = dict.fromkeys(row["pass"] for row in rows)
    ratios = (against("stock")([r for r in rows if r["pass"] == number]) for number in passes)
    return median(map(median, ratios)) >= BAR

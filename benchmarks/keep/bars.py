# SPDX-License-Identifier: Apache-2.0
"""The bar of kept messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.stats import median
from benchmarks.harness.tables import of, over

BAR = 20.0
_LEAST_TOKENS = 8000  # from which the bar counts
ratios = over(of("encode_s"), of("load_s"))  # of each turn


def bar_reached(rows: Sequence[Mapping[str, str]]) -> bool:
    """Check whether loading is as much faster as it should be; with no long runs, yes."""
    long = [row for row in rows if int(row["tokens"]) >= _LEAST_TOKENS]
    return not long or median(ratios(long)) >= BAR

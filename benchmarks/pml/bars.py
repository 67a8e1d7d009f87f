# SPDX-License-Identifier: Apache-2.0
"""The bar of prompts from schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.stats import median
from benchmarks.harness.tables import of

BAR = 100.0  # text / cached, one prompt in flight, at every length of at least LONG tokens
LONG = 5000
Rows = Sequence[Mapping[str, str]]


def ratio(rows: Rows, tokens: int) -> float:
    """Text / cached of one prompt in flight, by medians over the turns."""
    text, cached = (
        of("median_s", document_tokens=tokens, in_flight=1, side=side)(rows)
        for side in ("text", "cached")
    )
    return median(text) / median(cached)


def bar_reached(rows: Rows) -> bool:
    """Check whether long documents reach the bar; without any there is none."""
    lengths = {int(row["document_tokens"]) for row in rows if row["in_flight"] == "1"}
    return all(ratio(rows, tokens) >= BAR for tokens in lengths if tokens >= LONG)

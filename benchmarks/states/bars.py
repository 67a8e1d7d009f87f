# SPDX-License-Identifier: Apache-2.0
"""The bars of models with states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Values, of, over

FIRST_TOKEN_BAR = 3.0  # stock / chain, where a chain has messages to read and stock finds nothing
ORDINARY_BAR = 0.98  # throughput with the plugin / without, of requests that share nothing
Rows = Sequence[Mapping[str, Any]]


def found_by_stock(row: Mapping[str, Any]) -> str:
    """What the prefix cache of vLLM without the plugin has of the text of a turn."""
    if int(row["turn"]) == 0:
        return "first turn"
    return "something" if int(row["stock_reused_tokens"]) else "nothing"


def first_token_ratio(rows: Rows) -> float:
    """Seconds to first token of text without the plugin / of the chain."""
    return median(of("first_token_s", side="stock")(rows)) / median(
        of("first_token_s", side="chain")(rows)
    )


def against_stock(**where: Any) -> Values:
    """Throughput of ordinary requests with the plugin / without, turn by turn."""
    return over(
        of("tokens_per_s", side="plugin", **where), of("tokens_per_s", side="stock", **where)
    )


def bars_reached(conversations: Rows, batches: Rows) -> bool:
    """Check whether all ratios are what they should be."""
    unfound = [row for row in conversations if found_by_stock(row) == "nothing"]
    is_fast = bool(unfound) and first_token_ratio(unfound) >= FIRST_TOKEN_BAR
    kinds = {(row["shared_tokens"], row["is_warm"]) for row in batches}
    return is_fast and all(
        median(against_stock(shared_tokens=shared, is_warm=is_warm)(batches)) >= ORDINARY_BAR
        for shared, is_warm in kinds
    )

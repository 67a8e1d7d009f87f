# SPDX-License-Identifier: Apache-2.0
"""The tables of rivals' settings, one for each layout."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.tables import Cell, Rows, Table, Values, mean, middle, of, only, spread

LAYOUTS = ("permuted", "multidoc", "ragqa", "agents")


def _filled(column: str, scale: float = 1.0) -> Values:
    """A column of the rows that have something in it."""
    return lambda rows: of(column, scale)([row for row in rows if row[column] != ""])


def _share_cached(rows: Rows) -> list[float]:
    pairs = zip(of("cached_tokens")(rows), of("prompt_tokens")(rows), strict=True)
    return [cached / max(1.0, tokens) for cached, tokens in pairs]


_COLUMNS: Mapping[str, Cell] = {
    "requests": lambda rows: len(rows),
    "prompt tokens": middle(of("prompt_tokens"), ".0f"),
    "first token, ms": spread(of("first_token_s", 1e3), ".0f"),
    "whole answer, ms": spread(of("seconds", 1e3), ".0f"),
    "prompt reused": middle(_share_cached, ".0%"),
    "same answer as stock": mean(of("same"), ".2f"),
    "F1 to stock": mean(of("f1_to_stock"), ".2f"),
    "F1 to gold": mean(_filled("f1"), ".3f"),
}
TABLES = {
    f"rivals_{name}": Table(f"rivals_{name}", {"side": "side"}, _COLUMNS, only(kind="timed"))
    for name in LAYOUTS
}

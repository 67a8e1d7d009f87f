# SPDX-License-Identifier: Apache-2.0
"""The tables of chats that name no messages: a retrieval bot, and agents over one history."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Table, Values, middle, of, paired_ratio, text
from benchmarks.on_ramps.bars import BLOCKS_BAR, FIRST_TOKEN_BAR, blocks_ratio, later


def _ms(seconds: Values) -> Cell:
    return middle(lambda rows: [1e3 * value for value in seconds(rows)], ".0f")


def _first(side: str) -> Values:
    return lambda rows: of("first_token_s", side=side)(rows)[:1]


def _reused(side: str) -> Cell:
    return middle(lambda rows: of("reused_tokens", side=side)(rows)[1:], ".0f")


TABLES = {
    "on_ramps_retrieval": Table(
        "on_ramps_retrieval",
        {"tokens": "prompt_tokens"},
        {
            **{f"first turn, {side}, ms": _ms(_first(side)) for side in ("text", "choreo")},
            **{f"others, {side}, ms": _ms(later(side)) for side in ("text", "choreo")},
            "text / choreo": paired_ratio(later("text"), later("choreo"), ".1f"),
            "bar": lambda rows: f"{FIRST_TOKEN_BAR:.0f}",
            "reused tokens": _reused("choreo"),
        },
    ),
    "on_ramps_agents": Table(
        "on_ramps_agents",
        {"agents": "agents", "tokens": "history_tokens"},
        {
            **{f"KV blocks, {side}": text("kv_blocks", side=side) for side in ("text", "choreo")},
            "text / choreo": lambda rows: f"{blocks_ratio(rows):.1f}",
            "bar": lambda rows: f"{BLOCKS_BAR:.0f}",
            **{f"s, {side}": middle(of("seconds", side=side), ".1f")
               for side in ("text", "choreo")},
        },
    ),
}  # fmt: skip

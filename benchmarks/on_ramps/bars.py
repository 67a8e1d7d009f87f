# SPDX-License-Identifier: Apache-2.0
"""The bars of chats that name no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Values, of

FIRST_TOKEN_BAR = 30.0  # text / choreo, for prompts of at least LONG tokens
LONG = 5000
BLOCKS_BAR = 4.0  # text / choreo
Rows = Sequence[Mapping[str, str]]


def later(side: str) -> Values:
    """Seconds to first token of the turns after the first one."""
    return lambda rows: of("first_token_s", side=side)(rows)[1:]


def first_token_ratio(rows: Rows) -> float:
    """Ratio of text and choreo over the turns after the first one."""
    return median(later("text")(rows)) / median(later("choreo")(rows))


def blocks_ratio(rows: Rows) -> float:
    """Ratio of text and choreo."""
    blocks = {row["side"]: int(row["kv_blocks"]) for row in rows}
    return blocks["text"] / blocks["choreo"]


def bars_reached(retrieval: Rows, agents: Rows) -> bool:
    """Check whether both ratios are what they should be; short prompts have no bar."""
    is_long = bool(retrieval) and int(retrieval[0]["prompt_tokens"]) >= LONG
    is_fast = not is_long or first_token_ratio(retrieval) >= FIRST_TOKEN_BAR
    return is_fast and (not agents or blocks_ratio(agents) >= BLOCKS_BAR)

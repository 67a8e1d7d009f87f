# SPDX-License-Identifier: Apache-2.0
"""The bars of chats that are cut inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Values, of

EDIT_BAR = 5.0  # text / choreo, for prompts of at least LONG tokens
LONG = 2000
SHARE_BAR = 0.01  # of the time to the first token, for cutting
Rows = Sequence[Mapping[str, str]]


def later(side: str, column: str = "first_token_s") -> Values:
    """A column of a side's turns after the first one."""

    def values(rows: Rows) -> list[float]:
        pairs = zip(of(column, side=side)(rows), of("turn", side=side)(rows), strict=True)
        return [value for value, turn in pairs if turn]

    return values


def edits_reach_bar(rows: Rows) -> bool:
    """Check the ratio of text and choreo of every kind of chat; short prompts have no bar."""
    kinds = {row["chat"] for row in rows if int(row["prompt_tokens"]) >= LONG}
    return all(
        median(later("text")(one)) >= EDIT_BAR * median(later("choreo")(one))
        for one in ([row for row in rows if row["chat"] == kind] for kind in kinds)
    )


def cost_reaches_bar(rows: Rows) -> bool:
    """Check that cutting takes no more of the time to the first token than it may."""
    return all(float(row["share"]) <= SHARE_BAR for row in rows)

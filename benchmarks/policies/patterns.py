# SPDX-License-Identifier: Apache-2.0
"""Where readers of one message are, call by call.

A position is a distance here: scores depend on how far the reader is behind the message alone.
"""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("query", "in_place")
CALLS = 5  # of a pattern, one after the other


@dataclass(frozen=True)
class Pattern:
    """Distances of the readers, call by call; readers of one call run in parallel."""

    name: str
    title: str
    distances: tuple[tuple[int, ...], ...]


PATTERNS = (
    Pattern("own", "one reader, where the message was encoded", ((0,),) * CALLS),
    Pattern("again", "one reader, one new position again and again", ((100,),) * CALLS),
    Pattern("alternate", "readers alternate between two positions", ((100,), (300,)) * CALLS),
    Pattern("together", "8 readers at once, each at its own", (tuple(range(100, 900, 100)),) * 3),
    Pattern("all own", "8 readers at once, where it was encoded", ((0,) * 8,) * 3),
)

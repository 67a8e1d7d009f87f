# SPDX-License-Identifier: Apache-2.0
"""Ranges of a model's layers, and what repairing tokens in them costs."""

from __future__ import annotations

from typing import NamedTuple

# The layers `first … stop-1`.
Range = tuple[int, int]


class LayerRanges(NamedTuple):
    """Some of the layers of a model that has `num_layers`.

    Attributes:
        ranges: ascending; between two of them there is a layer at least.
        share: None: tokens are anew in these layers. Else they are run through these alone to find
            the blocks whose keys in the last of them change most, up to this share of the tokens:
            those are anew in all layers, and nothing else is.
    """

    ranges: tuple[Range, ...]
    num_layers: int
    share: float | None = None

    @property
    def entries(self) -> tuple[int, ...]:
        """The layers that are given hidden states which were kept: layer 0 is given the tokens."""
        return entries_of(self.ranges)

    @property
    def is_all(self) -> bool:
        return self.ranges == ((0, self.num_layers),)

    def repaired(self, num_tokens: int) -> int:
        """How many of the tokens are anew, at most."""
        return num_tokens if self.share is None else int(self.share * num_tokens)

    def charged(self, num_tokens: int) -> int:
        """As many tokens through all layers cost as much."""
        num_run = sum(stop - first for first, stop in self.ranges)
        through = -(-num_tokens * num_run // self.num_layers)
        return through if self.share is None else through + self.repaired(num_tokens)


def entries_of(ranges: tuple[Range, ...]) -> tuple[int, ...]:
    """See `LayerRanges.entries`."""
    return tuple(first for first, _ in ranges if first)

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
    """

    ranges: tuple[Range, ...]
    num_layers: int

    @property
    def entries(self) -> tuple[int, ...]:
        """Layers that are given hidden states which were kept: layer 0 is given the tokens."""
        return entries_of(self.ranges)

    @property
    def is_all(self) -> bool:
        return self.ranges == ((0, self.num_layers),)

    def charged(self, num_tokens: int) -> int:
        """Number of tokens that cost as much if encoded in all layers."""
        num_run = sum(stop - first for first, stop in self.ranges)
        return -(-num_tokens * num_run // self.num_layers)


def middle_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a model whose attention tells which tokens a call reads most."""
    return tuple(dict.fromkeys(num_layers * part // 10 for part in (4, 5, 6)))


def entries_of(ranges: tuple[Range, ...]) -> tuple[int, ...]:
    """First layers of the ranges, without layer 0, see `LayerRanges.entries`."""
    return tuple(first for first, _ in ranges if first)

# SPDX-License-Identifier: Apache-2.0
"""Ranges of a model's layers, and what repairing tokens in them costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, NamedTuple

from msgspec import Meta

from vllm_choreo.errors import RepairError

# The layers `first … stop-1`.
Range = tuple[int, int]
Ranges = tuple[Range, ...]
_ADVICE = (
    "layers are (first, stop) with 0 <= first < stop, or a list of these, ascending and "
    "with a layer between two of them at least, or () for none"
)
LayerList = Annotated[Ranges, Meta(description=_ADVICE)]


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


def check_ranges(ranges: Ranges) -> None:
    """Raise RepairError unless ranges of layers are ascending and lie apart."""
    is_right = all(0 <= first < stop for first, stop in ranges)
    if not is_right or any(stop >= first for (_, stop), (first, _) in pairwise(ranges)):
        raise RepairError(_ADVICE, parameter="repair.layers", value=ranges)


def middle_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a model whose attention tells which tokens a call reads most."""
    return tuple(dict.fromkeys(num_layers * part // 10 for part in (4, 5, 6)))


def entries_of(ranges: tuple[Range, ...]) -> tuple[int, ...]:
    """First layers of the ranges, without layer 0, see `LayerRanges.entries`."""
    return tuple(first for first, _ in ranges if first)

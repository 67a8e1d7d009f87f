# SPDX-License-Identifier: Apache-2.0
"""Order of what depends on one another."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

T = TypeVar("T", bound=Hashable)
Rank = tuple[int, ...]


def in_order(depends: Mapping[T, Iterable[T]], rank: Callable[[T], Rank]) -> list[T]:
    """Order things, each after those on which it depends, by their rank as far as that is possible.

    Args:
        depends: those on which each depends.
        rank: distinct ranks; of things that may come next, the one of least rank does.

    Returns:
        All but those that wait for one another, and those that wait for them.
    """
    sorter = TopologicalSorter(depends)
    with suppress(CycleError):
        sorter.prepare()
    free: list[tuple[Rank, T]] = []
    order: list[T] = []
    while sorter.is_active():
        for ready in sorter.get_ready():
            heapq.heappush(free, (rank(ready), ready))
        order.append(heapq.heappop(free)[1])
        sorter.done(order[-1])
    return order

# SPDX-License-Identifier: Apache-2.0
"""Iterated local search for a schedule of a few calls on one worker, by moving calls.

A rule that looks one call ahead cannot see that a short wait now saves a long one later. With few
calls it costs little to try.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from vllm_choreo.planner.physical.cost import Calls, CostModel

# Schedules that are looked at, by the square of the number of calls: 0.3 s with 24 of them.
_TRIES_PER_PAIR = 20
_LONGEST_RUN = 4  # calls that are moved together


def search_order(calls: Calls, orders: Sequence[Sequence[int]], model: CostModel) -> list[int]:
    """Search for the best order of the calls, from each of `orders` on."""
    search = _Search(calls, model, list(calls.num_out))
    return search.run([list(order) for order in orders])


class _Search:
    """Search over calls by their place in `names`; `_usage[i][j]`: usage of `j` right after `i`."""

    def __init__(self, calls: Calls, model: CostModel, names: Sequence[int]) -> None:
        self._names = names
        place = {call: i for i, call in enumerate(names)}
        self._usage = [
            [0.0 if i == j else calls.usage(model, i, j) for j in names] for i in [*names, None]
        ]
        self._depends = [[place[other] for other in calls.depends.get(call, ())] for call in names]
        self._delay = [model.delay(calls.num_out[call]) for call in names]
        self._place = place
        self._tries = 0
        self._most = _TRIES_PER_PAIR * len(names) ** 2
        self._random = random.Random(0)  # the same plan every time

    def run(self, orders: Sequence[Sequence[int]]) -> list[int]:
        starts = [[self._place[call] for call in order] for order in orders]
        best = min(
            (self._descend(start, self.total(start)) for start in starts), key=lambda b: b[1]
        )
        least = self._least() * (1 + 1e-9)
        while self._tries < self._most and len(self._names) > 2 and best[1] > least:
            kicked = list(best[0])
            for _ in range(self._random.randint(1, 3)):
                kicked = self._kick(kicked)
            found = self._descend(kicked, self.total(kicked))
            if found[1] < best[1] * (1 - 1e-12):
                best = found
        return [self._names[i] for i in best[0]]

    def total(self, order: Sequence[int]) -> float:
        """Token steps of an order; infinite where a call stands before one on which it depends."""
        self._tries += 1
        answered = [-1.0] * len(order)
        clock, last = 0.0, len(order)
        for i in order:
            start = clock
            for other in self._depends[i]:
                at = answered[other]
                if at < 0.0:
                    return float("inf")
                if at > start:
                    start = at
            clock = start + self._usage[last][i]
            answered[i] = clock + self._delay[i]
            last = i
        return clock

    def _least(self) -> float:
        """Lower bound of all orders: the longest chain of calls, or the sum of least usages."""
        size = len(self._names)
        own = [min(self._usage[i][j] for i in range(size + 1) if i != j) for j in range(size)]
        chain = [0.0] * size
        for j in range(size):  # each call stands after those on which it depends
            before = [chain[i] + self._delay[i] for i in self._depends[j]]
            chain[j] = own[j] + max(before, default=0.0)
        return max([*chain, sum(own)])

    def _descend(self, order: list[int], total: float) -> tuple[list[int], float]:
        better = True
        while better and self._tries < self._most:
            better = False
            for other in self._neighbours(order):
                found = self.total(other)
                if found < total * (1 - 1e-12):
                    order, total, better = other, found, True
                    break
                if self._tries >= self._most:
                    break
        return order, total

    def _neighbours(self, order: list[int]) -> Iterator[list[int]]:
        """Yield, shuffled, the orders in which one run of calls stands elsewhere."""
        size = len(order)
        moves = [
            (length, start)
            for length in range(1, min(_LONGEST_RUN, size - 1) + 1)
            for start in range(size - length + 1)
        ]
        self._random.shuffle(moves)
        for length, start in moves:
            run, rest = order[start : start + length], order[:start] + order[start + length :]
            for to in range(len(rest) + 1):
                if to != start:
                    yield rest[:to] + run + rest[to:]

    def _kick(self, order: list[int]) -> list[int]:
        """Swap two neighbouring runs of calls, drawn at random."""
        a, b, c = sorted(self._random.sample(range(len(order) + 1), 3))
        return order[:a] + order[b:c] + order[a:b] + order[c:]

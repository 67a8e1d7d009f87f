# SPDX-License-Identifier: Apache-2.0
"""Work that waits at each engine, and which engines have least: kept as it changes."""

from __future__ import annotations

import heapq


class Loads:
    """Queues of engines, in the unit of work in which their costs are given.

    The idlest engines are found in a heap in which entries of old queues stay until they come up: a
    change costs the logarithm of the number of engines. Of those with equal queues the one whose
    queue has not changed for longest comes first, so that all take their turns.

    Args:
        num_engines: number of engines, which have nothing to do.

    Attributes:
        queue: work that waits at each engine, by its number; infinite where there is none.
    """

    def __init__(self, num_engines: int) -> None:
        self.queue = [0.0] * num_engines
        self._changes = list(range(num_engines))  # by engine: the number of its latest change
        self._num_changes = num_engines
        self._heap = [(0.0, engine, engine) for engine in range(num_engines)]

    def add(self, engine: int, work: float) -> None:
        """Add to an engine's queue, or take away what is done."""
        self.put(engine, max(0.0, self.queue[engine] + work))

    def put(self, engine: int, queue: float) -> None:
        """Set an engine's queue; infinite: it takes no calls."""
        self.queue[engine] = queue
        self._changes[engine] = change = self._num_changes
        self._num_changes += 1
        heapq.heappush(self._heap, (queue, change, engine))
        if len(self._heap) > 4 * len(self.queue) + 64:
            self._heap = list(zip(self.queue, self._changes, range(len(self.queue)), strict=True))
            heapq.heapify(self._heap)

    def least(self, count: int) -> list[int]:
        """Engines with the shortest queues, the idlest first; no more than `count`."""
        heap, changes = self._heap, self._changes
        found: list[tuple[float, int, int]] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            if changes[entry[2]] == entry[1]:  # else it is of an old queue
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return [engine for _, _, engine in found]

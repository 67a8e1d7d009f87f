# SPDX-License-Identifier: Apache-2.0
"""Work that waits at each engine, and which engines have least: kept as it changes."""

from __future__ import annotations

from bisect import bisect_left, insort


class Loads:
    """Queues of engines, in the unit of work in which their costs are given.

    The engines stand in a sorted list, so that the idlest ones, which every call asks for, are
    there at once. A change finds its places in the logarithm of the number of engines, and moves
    what stands between them: 8 bytes an engine. Of those with equal queues the one whose queue has
    not changed for longest comes first, so that all take their turns.

    Args:
        num_engines: number of engines, which have nothing to do.

    Attributes:
        queue: work that waits at each engine, by its number; infinite where there is none.
    """

    def __init__(self, num_engines: int) -> None:
        self.queue = [0.0] * num_engines
        # By engine: its queue, the number of its latest change, its own.
        self._entries = [(0.0, engine, engine) for engine in range(num_engines)]
        self._sorted = list(self._entries)
        self._num_changes = num_engines

    def add(self, engine: int, work: float) -> None:
        """Add to an engine's queue, or take away what is done."""
        self.put(engine, max(0.0, self.queue[engine] + work))

    def put(self, engine: int, queue: float) -> None:
        """Set an engine's queue; infinite: it takes no calls."""
        self.queue[engine] = queue
        del self._sorted[bisect_left(self._sorted, self._entries[engine])]
        self._entries[engine] = entry = (queue, self._num_changes, engine)
        self._num_changes += 1
        insort(self._sorted, entry)

    def least(self, count: int) -> list[int]:
        """Engines with the shortest queues, the idlest first; no more than `count`."""
        return [engine for _, _, engine in self._sorted[:count]]

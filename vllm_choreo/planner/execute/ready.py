# SPDX-License-Identifier: Apache-2.0
"""Calls of one worker that can run, and which of them is next: the plan's order is a soft one."""

from __future__ import annotations

import heapq

from vllm_choreo.planner.plan import Plan

DISPATCHES = ("rank", "pending")


class ReadyCalls:
    """Calls that can run, in the order in which they are to be begun.

    By "rank", the plan's order of calls decides. By "pending", as in the paper, its order of nested
    sequences does, and in a sequence the query with the most calls that can run comes first.

    Args:
        plan: the calls; `Target.dispatch` says which one is next.
        worker: number of the worker.
    """

    def __init__(self, plan: Plan, worker: int) -> None:
        self._plan = plan
        sequences = plan.sequences[worker] if worker < len(plan.sequences) else []
        self._sequence = {node: i for i, nodes in enumerate(sequences) for node in nodes}
        # By (sequence, query), or one for all.
        self._heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def push(self, call: int) -> None:
        """Add a call that can run."""
        task, key = self._plan.tasks[call], (0, 0)
        if self._plan.target.dispatch == "pending":
            key = (self._sequence.get(task.node, 0), task.query)
        entry = (self._plan.rank.get(call, call), call)
        heapq.heappush(self._heaps.setdefault(key, []), entry)

    def pop(self) -> int:
        """Take out the call that is next."""
        sequence = min(sequence for sequence, _ in self._heaps)
        here = [key for key in self._heaps if key[0] == sequence]
        key = min(here, key=lambda key: (-len(self._heaps[key]), self._heaps[key][0]))
        _, call = heapq.heappop(self._heaps[key])
        if not self._heaps[key]:
            del self._heaps[key]
        return call

    def __bool__(self) -> bool:
        return bool(self._heaps)

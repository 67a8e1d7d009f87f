# SPDX-License-Identifier: Apache-2.0
"""Placement of calls: on the worker that holds a call's parents and prompt prefix, unless that
worker has more to do than moving costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from vllm_choreo.planner.physical.cost import Calls, CostModel
from vllm_choreo.planner.physical.radix import TreeNode
from vllm_choreo.planner.plan import Plan

# Holders of a long path are many where prompts begin alike; only so many of them are looked at.
_CANDIDATES = 4


class Router:
    """Placement of calls one after the other, each after those on which it depends.

    Args:
        calls: prompts, lengths of answers and dependencies.
        num_workers: number of workers.
        model: the cost model.
    """

    def __init__(self, calls: Calls, num_workers: int, model: CostModel) -> None:
        self.loads = [0.0] * num_workers
        self.worker: dict[int, int] = {}
        self._calls, self._model = calls, model
        self._idle = [(0.0, worker) for worker in range(num_workers)]
        self._held: dict[TreeNode, set[int]] = {}
        self._latest: dict[TreeNode, list[int]] = {}  # the last few of those that hold a node

    def place(self, call: int) -> int:
        """Choose the worker of a call, and count the call as its load."""
        path = self._calls.tree.end[call].path()
        candidates = self._candidates(call, path)
        costs = {worker: self._cost(call, path, worker) for worker in candidates}
        best = min(candidates, key=lambda worker: (self.loads[worker] + costs[worker], worker))
        self.loads[best] += costs[best]
        heapq.heappush(self._idle, (self.loads[best], best))
        self.worker[call] = best
        for node in path:
            held = self._held.setdefault(node, set())
            if best not in held:
                held.add(best)
                self._latest[node] = [*self._latest.get(node, ())[1 - _CANDIDATES :], best]
        return best

    def _candidates(self, call: int, path: Sequence[TreeNode]) -> list[int]:
        found = {self._idlest(): None}
        for other in self._calls.depends.get(call, ())[:_CANDIDATES]:
            found[self.worker[other]] = None
        for node in reversed(path):
            found.update(dict.fromkeys(self._latest.get(node, ())))
            if len(found) > _CANDIDATES:
                break
        return list(found)

    def _cost(self, call: int, path: Sequence[TreeNode], worker: int) -> float:
        new = sum(node.weight for node in path if worker not in self._held.get(node, ()))
        times = self._calls.times.get(call, 1.0)
        return self._model.usage(new, self._calls.num_out[call], worker, times)

    def _idlest(self) -> int:
        """Worker with the least load; entries of old loads are dropped on the way."""
        while self._idle[0][0] != self.loads[self._idle[0][1]]:
            heapq.heappop(self._idle)
        return self._idle[0][1]


def place(plan: Plan) -> Plan:
    """Give each worker its calls, in their fixed order."""
    calls, target = plan.calls, plan.target
    assigned: list[list[int]] = [[] for _ in range(target.num_workers)]
    if target.num_workers == 1:
        assigned = [list(calls.num_out)]
    else:
        router = Router(calls, target.num_workers, target.cost)
        for call in calls.num_out:
            assigned[router.place(call)].append(call)
    return replace(plan, table=calls.timetable(assigned, target.cost))

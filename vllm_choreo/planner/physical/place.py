# SPDX-License-Identifier: Apache-2.0
"""Placement of calls: on the worker that holds a call's parents and prompt prefix, unless that
worker has more to do than moving costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_choreo.fleet.loads import Loads
from vllm_choreo.fleet.placement import Read
from vllm_choreo.fleet.placement import place as place_call
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
        self.loads = Loads(num_workers)
        self.worker: dict[int, int] = {}
        self._calls, self._model = calls, model
        self._held: dict[TreeNode, set[int]] = {}
        self._latest: dict[TreeNode, list[int]] = {}  # the last few of those that hold a node

    def place(self, call: int) -> int:
        """Choose the worker of a call, and count the call as its load."""
        path = self._calls.tree.end[call].path()
        new, rates = self._model.rates(self._calls.num_out[call], self._calls.times.get(call, 1.0))
        reads = [Read(node, node.weight, self._held.get(node, ())) for node in path]
        candidates = self._candidates(call, path)
        best, cost, _ = place_call(reads, new, candidates, self.loads.queue, rates)
        self.loads.add(best, cost)
        self.worker[call] = best
        for node in path:
            held = self._held.setdefault(node, set())
            if best not in held:
                held.add(best)
                self._latest[node] = [*self._latest.get(node, ())[1 - _CANDIDATES :], best]
        return best

    def _candidates(self, call: int, path: Sequence[TreeNode]) -> list[int]:
        found = dict.fromkeys(self.loads.least(1))
        for other in self._calls.depends.get(call, ())[:_CANDIDATES]:
            found[self.worker[other]] = None
        for node in reversed(path):
            found.update(dict.fromkeys(self._latest.get(node, ())))
            if len(found) > _CANDIDATES:
                break
        return list(found)


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

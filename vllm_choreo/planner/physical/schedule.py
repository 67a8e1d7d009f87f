# SPDX-License-Identifier: Apache-2.0
"""Cache-aware order of calls, in which prompts are shared and no worker waits.

Helium's algorithm 1 goes through the templated radix tree like a depth-first search: it takes, of
the calls that can run now, one that shares the longest prefix with the last one; among subtrees the
one with the longest chain of calls still to come (critical path). If none can run, time goes on to
the first that can. Here each node of the tree keeps its calls that can run in a heap, so that a
step costs the depth of the tree and not the number of its children.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from vllm_choreo.planner.physical.cost import Calls, CostModel, Timetable
from vllm_choreo.planner.physical.improve import search_order
from vllm_choreo.planner.physical.radix import TreeNode
from vllm_choreo.planner.plan import Plan

# Up to so many calls are scheduled one by one, beside the order of their operators.
_SINGLE_UP_TO = 2000
# Up to so many calls on one worker a schedule is improved by moving single ones.
_IMPROVE_UP_TO = 48


def schedule(plan: Plan) -> Plan:
    """Order the calls of each worker one by one, if that beats the order that they have."""
    if len(plan.calls.num_out) > _SINGLE_UP_TO:
        return plan
    single = order_calls(plan.calls, plan.table.orders, plan.target.cost)
    return replace(plan, table=min(single, plan.table, key=lambda table: table.total))


def order_calls(
    calls: Calls, assigned: Sequence[Sequence[int]], model: CostModel, *, improve: bool = True
) -> Timetable:
    """Order the calls of each worker: the best of the orders that the rules below give.

    Args:
        calls: calls to be run.
        assigned: the calls of each worker.
        model: the cost model.
        improve: search on from these orders, if there are few calls on one worker.
    """
    tails = critical_paths(calls, model)
    rules = (_nearest_prefix, _longest_tail)
    orders = [_greedy(calls, assigned, model, tails, rule) for rule in rules]
    found = [calls.timetable(order, model) for order in orders]
    best = min(found, key=lambda table: table.total)
    if improve and len(assigned) == 1 and len(calls.num_out) <= _IMPROVE_UP_TO:
        order = search_order(calls, [table.orders[0] for table in found], model)
        best = min(best, calls.timetable([order], model), key=lambda table: table.total)
    return best


def critical_paths(calls: Calls, model: CostModel) -> dict[int, float]:
    """Least token steps from each call's beginning to the end of all calls that depend on it."""
    tails: dict[int, float] = {}
    dependents = calls.dependents()
    depends = {call: calls.depends.get(call, ()) for call in calls.num_out}
    for call in reversed([*TopologicalSorter(depends).static_order()]):
        after = max((tails[other] for other in dependents[call]), default=None)
        # Decoding alone: what is encoded depends on the order.
        own = model.usage(0.0, calls.num_out[call])
        delay = 0.0 if after is None else model.delay(calls.num_out[call]) + after
        tails[call] = own + delay
    return tails


# -- rules: which of the calls that can run comes next ---------------------------------------------


class _Ready:
    """Calls of one worker that can run, by the nodes of the tree on their paths."""

    def __init__(self, calls: Calls, tails: dict[int, float], places: dict[int, int]) -> None:
        self.last: int | None = None
        self.count = 0
        self._calls = calls
        self._tails = tails
        self._taken: set[int] = set()
        self._places = places
        self._heaps: dict[TreeNode, list[tuple[float, float, int, int]]] = {}

    def add(self, call: int) -> None:
        """Add a call that can run from now on."""
        self.count += 1
        # Of equal tails, the one with the longer answer first; then as they are listed.
        entry = (-self._tails[call], -self._calls.num_out[call], self._places[call], call)
        node: TreeNode | None = self._calls.tree.end[call]
        while node is not None:
            heapq.heappush(self._heaps.setdefault(node, []), entry)
            node = node.parent

    def best_below(self, node: TreeNode) -> int | None:
        """Call with the longest tail of those in a subtree that can run; None: there is none."""
        heap = self._heaps.get(node)
        while heap and heap[0][3] in self._taken:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def take(self, call: int) -> int | None:
        """Take out a call that is scheduled; return the one before it."""
        self.count -= 1
        self._taken.add(call)
        before, self.last = self.last, call
        return before

    @property
    def root(self) -> TreeNode:
        return self._calls.tree.root

    @property
    def here(self) -> TreeNode:
        """Node of the tree at which the last call's prompt ends."""
        return self.root if self.last is None else self._calls.tree.end[self.last]


def _nearest_prefix(ready: _Ready) -> int:
    """Take a call from the smallest subtree around the last one: a depth-first search."""
    node: TreeNode | None = ready.here
    while node is not None:
        found = ready.best_below(node)
        if found is not None:
            return found
        node = node.parent
    raise AssertionError("no call can run")


def _longest_tail(ready: _Ready) -> int:
    """Take the call with the longest tail; of equal ones, the one with the nearest prefix."""
    best = ready.best_below(ready.root)
    assert best is not None
    limit = ready._tails[best] * (1 - 1e-9)
    node: TreeNode | None = ready.here
    while node is not None:
        found = ready.best_below(node)
        if found is not None and ready._tails[found] >= limit:
            return found
        node = node.parent
    return best


def _greedy(
    calls: Calls,
    assigned: Sequence[Sequence[int]],
    model: CostModel,
    tails: dict[int, float],
    rule: Callable[[_Ready], int],
) -> list[list[int]]:
    """Order calls by one rule; the worker whose clock is behind schedules next."""
    run = _Run(calls, assigned, model, tails)
    while run.busy:
        worker = run.next_worker()
        if worker is None:
            raise ValueError("calls that wait for one another")
        run.take(worker, rule(run.ready[worker]))
    return run.orders


class _Run:
    """Clocks of workers while a schedule is made."""

    def __init__(
        self,
        calls: Calls,
        assigned: Sequence[Sequence[int]],
        model: CostModel,
        tails: dict[int, float],
    ) -> None:
        self.orders: list[list[int]] = [[] for _ in assigned]
        self._places = {call: place for place, call in enumerate(calls.num_out)}
        self.ready = [_Ready(calls, tails, self._places) for _ in assigned]
        self.busy = sum(len(order) for order in assigned)
        self._calls, self._model = calls, model
        self._clocks = [0.0] * len(assigned)
        self._worker = {call: w for w, given in enumerate(assigned) for call in given}
        self._missing = {call: len(calls.depends.get(call, ())) for call in calls.num_out}
        self._dependents = calls.dependents()
        self._free: dict[int, float] = dict.fromkeys(calls.num_out, 0.0)
        # Calls that can run from some time on, by worker.
        self._coming: list[list[tuple[float, float, int]]] = [[] for _ in assigned]
        for call, count in self._missing.items():
            if not count:
                self.ready[self._worker[call]].add(call)
        self._tails = tails

    def next_worker(self) -> int | None:
        """Find the worker that can begin a call first, and set its clock to that time."""
        best: int | None = None
        first = float("inf")
        for worker, clock in enumerate(self._clocks):
            self._arrive(worker)
            if self.ready[worker].count:
                at = clock
            elif self._coming[worker]:
                at = self._coming[worker][0][0]
            else:
                continue
            if at < first:
                best, first = worker, at
        if best is not None:
            self._clocks[best] = max(self._clocks[best], first)
            self._arrive(best)
        return best

    def take(self, worker: int, call: int) -> None:
        """Schedule a call, and tell those that depend on it when they can run."""
        before = self.ready[worker].take(call)
        usage = self._calls.usage(self._model, before, call, worker)
        start = self._clocks[worker]
        first = start + usage / self._calls.times.get(call, 1.0)
        answered = first + self._model.delay(self._calls.num_out[call], worker)
        self._clocks[worker] = start + usage
        self.orders[worker].append(call)
        self.busy -= 1
        for other in self._dependents[call]:
            self._missing[other] -= 1
            self._free[other] = max(self._free[other], answered)
            if not self._missing[other]:
                entry = (self._free[other], self._places[other], other)
                heapq.heappush(self._coming[self._worker[other]], entry)

    def _arrive(self, worker: int) -> None:
        coming, clock = self._coming[worker], self._clocks[worker]
        while coming and coming[0][0] <= clock:
            self.ready[worker].add(heapq.heappop(coming)[2])

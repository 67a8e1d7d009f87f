# SPDX-License-Identifier: Apache-2.0
"""Simulation of a plan: the same placement and order, on the cost model's clock."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_choreo.planner.execute.progress import Progress
from vllm_choreo.planner.execute.ready import ReadyCalls
from vllm_choreo.planner.physical.cost import CostModel
from vllm_choreo.planner.physical.radix import TreeNode
from vllm_choreo.planner.plan import Plan


@dataclass(frozen=True)
class Simulation:
    """Measurements of a simulated run.

    Attributes:
        total: end of the last call, in token steps.
        busy: token steps that each worker has worked.
        num_calls: calls that were run.
        hit_rate: part of the prompt tokens that a worker had in its KV cache, which keeps the
            tokens that were read last.
        progress: progress of the run, with the values of all tasks.
    """

    total: float
    busy: list[float]
    num_calls: int
    hit_rate: float
    progress: Progress

    @property
    def balance(self) -> float:
        """Work of the busiest worker over the mean; 1 is best."""
        mean = sum(self.busy) / len(self.busy)
        return max(self.busy) / mean if mean else 1.0


def simulate(plan: Plan, model: CostModel, text: str = "answer") -> Simulation:
    """Simulate a plan in which every call answers with `text`."""
    run = _Simulator(plan, model, text)
    run.run()
    share = run.hits / run.tokens if run.tokens else 0.0
    return Simulation(run.total, run.busy, run.num_calls, share, run.progress)


class _Cache:
    """Prefixes of prompts that a worker holds; the least recently read is dropped first."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._held: OrderedDict[TreeNode, None] = OrderedDict()
        self._size = 0.0

    def read(self, path: Sequence[TreeNode]) -> float:
        """Read a prompt, which is held then; return the tokens of it that were held before."""
        hits = 0.0
        for node in path:
            if node not in self._held:
                break
            hits += node.weight
        for node in reversed(path):  # an end goes before the beginning that it needs
            if node not in self._held:
                self._held[node] = None
                self._size += node.weight
            self._held.move_to_end(node)
        while self._size > self._capacity and len(self._held) > len(path):
            self._size -= self._held.popitem(last=False)[0].weight
        return hits


class _Simulator:
    def __init__(self, plan: Plan, model: CostModel, text: str) -> None:
        self._plan, self._model, self._text = plan, model, text
        self.progress = Progress(plan)
        num_workers = len(plan.table.orders)
        self.busy = [0.0] * num_workers
        self.total = self.tokens = self.hits = 0.0
        self.num_calls = 0
        self._ready = [ReadyCalls(plan, number) for number in range(num_workers)]
        self._last: list[int | None] = [None] * num_workers
        self._caches = [_Cache(model.capacity) for _ in range(num_workers)]
        self._idle = set(range(num_workers))
        # What happens: (when, number, worker that becomes idle, call that is answered).
        self._events: list[tuple[float, int, int | None, int | None]] = []
        self._count = 0

    def run(self) -> None:
        self.progress.start()
        self._take(0.0)
        while self._events:
            now, _, worker, call = heapq.heappop(self._events)
            if worker is not None:
                self._idle.add(worker)
                self._begin(now, worker)
            if call is not None:
                self.progress.complete(call, self._text)
                self._take(now)

    def _take(self, now: float) -> None:
        """Queue calls that became ready, and begin them on idle workers."""
        woken = set()
        while self.progress.calls:
            call = self.progress.calls.popleft()
            worker = self._plan.worker[call]
            self._ready[worker].push(call)
            woken.add(worker)
        for worker in sorted(woken & self._idle):
            self._begin(now, worker)

    def _begin(self, now: float, worker: int) -> None:
        if not self._ready[worker]:
            return
        call = self._ready[worker].pop()
        calls = self._plan.calls
        new = calls.tree.new_tokens(self._last[worker], call)
        num_out = calls.num_out[call]
        end = now + self._model.usage(new, num_out, worker)
        self._idle.discard(worker)
        self._last[worker] = call
        self.busy[worker] += end - now
        self.num_calls += 1
        self.tokens += calls.tree.total(call)
        self.hits += self._caches[worker].read(calls.tree.end[call].path())
        self.total = max(self.total, end)
        self._at(end, worker, None)
        self._at(end + self._model.delay(num_out, worker), None, call)

    def _at(self, when: float, worker: int | None, call: int | None) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, worker, call))

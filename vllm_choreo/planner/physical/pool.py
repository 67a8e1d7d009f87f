# SPDX-License-Identifier: Apache-2.0
"""Model of one engine: continuous batching over a KV cache that drops what was read least recently.

A call takes KV cache for the part of its prompt that is not there, and for its answer; it waits
until there is room. What it has encoded stays until room is needed, ends of prompts before their
beginnings. A step encodes tokens, up to a budget, and decodes one for each call whose prompt is
encoded.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_choreo.planner.physical.cost import Calls, EngineModel
from vllm_choreo.planner.physical.radix import TreeNode


@dataclass
class PoolRun:
    """Measurements of calls on the model of an engine.

    Attributes:
        total: end of the last call, in the time in which one token is encoded.
        prompt, encoded: tokens of prompts, and those of them that were encoded.
        steps: begin and duration of each step, calls in the batch, and tokens that these have in
            the KV cache, shared ones once. Steps in which nothing changes are one.
    """

    total: float = 0.0
    prompt: float = 0.0
    encoded: float = 0.0
    steps: list[tuple[float, float, int, float]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that was in the KV cache."""
        return 1.0 - self.encoded / self.prompt if self.prompt else 0.0

    def mean(self, column: int) -> float:
        """Mean over time of a column of `steps`."""
        total = sum(step[1] for step in self.steps)
        return sum(step[1] * step[column] for step in self.steps) / total if total else 0.0


class Pool:
    """KV cache of one engine.

    Args:
        capacity: tokens that it holds.

    Attributes:
        held: segments of prompts, those that were read least recently first.
        in_use: tokens of the prompts of calls that run, shared ones once.
    """

    def __init__(self, capacity: float) -> None:
        self.held: OrderedDict[TreeNode, None] = OrderedDict()
        self.in_use = 0.0
        self._free = capacity
        self._users: dict[TreeNode, int] = {}

    def hits(self, path: Sequence[TreeNode]) -> float:
        """Tokens of a prompt's beginning that are held."""
        found = 0.0
        for node in path:
            if node not in self.held:
                break
            found += node.weight
        return found

    def take(self, path: Sequence[TreeNode], num_out: float) -> float | None:
        """Reserve room for a call; return the tokens to be encoded, None: there is no room."""
        new = sum(node.weight for node in path) - self.hits(path)
        for node in path:
            users = self._users[node] = self._users.get(node, 0) + 1
            self.in_use += node.weight * (users == 1)
        missing = sum(node.weight for node in path if node not in self.held) + num_out
        if not self._make_room(missing):
            self._leave(path)
            return None
        self._free -= missing
        for node in reversed(path):  # an end goes before the beginning that it needs
            self.held[node] = None
            self.held.move_to_end(node)
        return new

    def finish(self, path: Sequence[TreeNode], num_out: float, answer: TreeNode | None) -> None:
        """Give a call's room back; its prompt, and an answer that is gone on from, stay held."""
        self._free += num_out
        if answer is not None and answer not in self.held:
            self.held[answer] = None
            self._free -= answer.weight
        for node in reversed(path):
            self.held.move_to_end(node)
        self._leave(path)

    def _leave(self, path: Sequence[TreeNode]) -> None:
        for node in path:
            self._users[node] -= 1
            self.in_use -= node.weight * (not self._users[node])

    def _make_room(self, needed: float) -> bool:
        if self._free >= needed:
            return True
        for node in [node for node in self.held if not self._users.get(node)]:
            del self.held[node]
            self._free += node.weight
            if self._free >= needed:
                return True
        return False


Choose = Callable[["ModelEngine"], int | None]


class ModelEngine:
    """Run of calls on the model of an engine.

    Args:
        calls: prompts, lengths of answers and dependencies.
        model: KV cache and costs.

    Attributes:
        ready: calls whose inputs are there, in the order in which they came.
        running: [tokens to be encoded, tokens to be generated] of the calls that are begun.
        done: calls that are answered.
        pool: the KV cache.
        result: measurements.
    """

    def __init__(self, calls: Calls, model: EngineModel) -> None:
        self.pool = Pool(model.capacity)
        self.ready: dict[int, None] = {}
        self.running: dict[int, list[float]] = {}
        self.done: set[int] = set()
        self.result = PoolRun()
        self._calls, self._model = calls, model
        self._missing = {call: len(calls.depends[call]) for call in calls.num_out}
        self._dependents = calls.dependents()
        self._paths = {call: calls.tree.end[call].path() for call in calls.num_out}

    def path(self, call: int) -> list[TreeNode]:
        """Segments of a call's prompt."""
        return self._paths[call]

    def run(self, choose: Choose) -> PoolRun:
        """Run all calls; `choose` says which of `ready` is begun next, None: none yet.

        Raises:
            ValueError: a call does not fit the KV cache.
        """
        self.ready = {call: None for call, missing in self._missing.items() if not missing}
        while self.ready or self.running:
            self._begin(choose)
            if not self.running:
                raise ValueError("a call does not fit the KV cache")
            self._step()
        return self.result

    def _begin(self, choose: Choose) -> None:
        while self.ready and len(self.running) < self._model.width:
            call = choose(self)
            if call is None:
                return
            num_out = self._calls.num_out[call]
            new = self.pool.take(self._paths[call], num_out)
            if new is None:
                return
            del self.ready[call]
            self.running[call] = [max(new, 1.0), num_out]
            self.result.encoded += new
            self.result.prompt += self._calls.tree.total(call)

    def _step(self) -> None:
        """Encode some tokens; if there are none, decode until a call is answered."""
        model, encoding = self._model, [call for call, left in self.running.items() if left[0]]
        decoding = [call for call, left in self.running.items() if not left[0]]
        spent, steps = 0.0, 1.0
        for call in encoding:
            part = min(self.running[call][0], model.budget - spent)
            self.running[call][0] -= part
            spent += part
        if not encoding:
            steps = max(1.0, min(self.running[call][1] for call in decoding))
        duration = steps * (model.step + len(decoding) * model.decode) + spent
        step = (self.result.total, duration, len(self.running), self.pool.in_use)
        self.result.steps.append(step)
        self.result.total += duration
        for call in decoding:
            self.running[call][1] -= steps
            if self.running[call][1] <= 0:
                self._finish(call)

    def _finish(self, call: int) -> None:
        del self.running[call]
        self.done.add(call)
        answer = _answer(self._calls, call)
        self.pool.finish(self._paths[call], self._calls.num_out[call], answer)
        for other in self._dependents[call]:
            self._missing[other] -= 1
            if not self._missing[other]:
                self.ready[other] = None


def by_rank(ranks: Mapping[int, tuple[float, ...]]) -> Choose:
    """Choose, of the calls that can run, the one of least rank."""
    heap: list[tuple[tuple[float, ...], int]] = []
    seen: set[int] = set()

    def choose(engine: ModelEngine) -> int | None:
        for call in engine.ready:
            if call not in seen:
                seen.add(call)
                heapq.heappush(heap, (ranks[call], call))
        while heap and heap[0][1] not in engine.ready:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    return choose


def working_set(calls: Calls) -> float:
    """Tokens of all prompts and answers, shared ones once."""
    alone = (out for call, out in calls.num_out.items() if _answer(calls, call) is None)
    return sum(node.weight for node in _nodes(calls)) + sum(alone)


def least_encoded(calls: Calls) -> float:
    """Tokens that every order encodes: each beginning once, but for answers that are gone on from.

    They are in the KV cache when they have been generated.
    """
    answers = {_answer(calls, call) for call in calls.num_out}
    return sum(node.weight for node in _nodes(calls) if node not in answers)


def _nodes(calls: Calls) -> list[TreeNode]:
    """Segments of the calls' prompts, each once."""
    paths = (calls.tree.end[call].path() for call in calls.num_out)
    return list(dict.fromkeys(node for path in paths for node in path))


def _answer(calls: Calls, call: int) -> TreeNode | None:
    """Segment of a call's answer behind its prompt; None: no prompt goes on from it."""
    return calls.tree.end[call].children.get(call)

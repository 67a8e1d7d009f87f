# SPDX-License-Identifier: Apache-2.0
"""Cost of a schedule, in token steps (Helium, section 5).

In each of its decoding steps a call occupies the KV cache of its prompt, less the prefix that it
shares with the call before it on the same worker, and of its own tokens so far. A call that reads
its answer can begin only when that is decoded, which takes longer than its share of the batch: the
precedence delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_choreo.fleet.placement import Rates
from vllm_choreo.planner.physical.radix import TemplatedRadixTree

DEFAULT_CAPACITY = 32_768  # tokens of KV cache of a worker, where nothing is known


@dataclass(frozen=True)
class EngineModel:
    """Model of a worker's engine: what it holds at a time, and what its steps cost.

    Times are in the time in which the engine encodes one token. An 8B model on one H100 has about
    200 and 1, SmolLM2-135M in float32 on two CPU cores 4 and 2.5.

    Attributes:
        capacity: tokens that its KV cache holds.
        width: calls at a time.
        step: constant of each step.
        decode: time of each call that decodes a token in a step.
        budget: tokens that a step encodes at most.
    """

    capacity: float
    width: int = 16
    step: float = 200.0
    decode: float = 1.0
    budget: float = 8192.0


@dataclass(frozen=True)
class CostModel:
    """Cost of calls on workers that are alike, unless `slowness` says otherwise.

    Attributes:
        capacity: tokens that the KV cache of a worker holds: `M` of the paper.
        slowness: factor of each worker's cost, by its number; 1 for those that are left out.
            `alpha` of the paper is this over `capacity`.
        engine: model of an engine, by which calls are put into blocks that fit its KV cache; None:
            all calls fit.
    """

    capacity: float = DEFAULT_CAPACITY
    slowness: Mapping[int, float] = field(default_factory=dict)
    engine: EngineModel | None = None

    def usage(self, num_new: float, num_out: float, worker: int = 0, times: float = 1.0) -> float:
        """Token steps of a call: `u` of the paper.

        Args:
            num_new: tokens of its prompt that the call before it on the worker did not have.
            num_out: tokens that it generates.
            worker: number of the worker that runs it.
            times: number of calls of that kind.
        """
        used = num_out * num_new + num_out * (num_out + 1) / 2
        return times * self.slowness.get(worker, 1.0) * used / self.capacity

    def rates(self, num_out: float, times: float = 1.0) -> tuple[float, Rates]:
        """Token steps of a call without its prompt, and of each token of that; see `usage`."""
        own = times * num_out * (num_out + 1) / 2 / self.capacity
        return own, Rates(encode=times * num_out / self.capacity, slowness=self.slowness)

    def delay(self, num_out: float, worker: int = 0) -> float:
        """Token steps from a call's end to the start of calls that read it: `d` of the paper."""
        return self.slowness.get(worker, 1.0) * num_out


@dataclass(frozen=True)
class Timetable:
    """Beginning and end of each call, in token steps.

    Attributes:
        begin, end: token steps from the start of the schedule, by call.
        orders: the calls of each worker, in their order.
        num_new: prompt tokens to be encoded, by call.
    """

    begin: Mapping[int, float]
    end: Mapping[int, float]
    orders: Sequence[Sequence[int]]
    num_new: Mapping[int, float]

    @property
    def total(self) -> float:
        """End of the last call: `T` of the paper."""
        return max(self.end.values(), default=0.0)


@dataclass
class Calls:
    """Calls to be scheduled: single ones, or operators that stand for many.

    Attributes:
        tree: their prompts.
        num_out: tokens that each generates.
        depends: calls on whose answers each depends.
        times: number of calls that each stands for; 1 for those that are left out.
    """

    tree: TemplatedRadixTree
    num_out: dict[int, float]
    depends: dict[int, tuple[int, ...]]
    times: dict[int, float] = field(default_factory=dict)

    def usage(self, model: CostModel, before: int | None, call: int, worker: int = 0) -> float:
        """Token steps of a call right after `before` (None: it is the first) on a worker."""
        new = self.tree.new_tokens(before, call)
        return model.usage(new, self.num_out[call], worker, self.times.get(call, 1.0))

    def restricted(self, order: Sequence[int]) -> Calls:
        """Return some of the calls; what they read of others is taken to be there."""
        here = set(order)
        depends = {call: tuple(c for c in self.depends[call] if c in here) for call in order}
        return Calls(self.tree, {call: self.num_out[call] for call in order}, depends)

    def dependents(self) -> dict[int, list[int]]:
        """Calls that depend on each call."""
        found: dict[int, list[int]] = {call: [] for call in self.num_out}
        for call, before in self.depends.items():
            for other in before:
                found[other].append(call)
        return found

    def timetable(self, orders: Sequence[Sequence[int]], model: CostModel) -> Timetable:
        """Timetable of the calls in these orders, one list for each worker.

        Raises:
            ValueError: the orders wait for one another.
        """
        begin: dict[int, float] = {}
        end: dict[int, float] = {}
        num_new: dict[int, float] = {}
        ready: dict[int, float] = {}  # from when on those that read it may begin
        at = [0] * len(orders)
        clock = [0.0] * len(orders)
        left = sum(len(order) for order in orders)
        while left:
            moved = False
            for worker, order in enumerate(orders):
                while at[worker] < len(order):
                    call = order[at[worker]]
                    waits = self.depends.get(call, ())
                    if any(other not in ready for other in waits):
                        break
                    before = order[at[worker] - 1] if at[worker] else None
                    start = max([clock[worker], *(ready[other] for other in waits)])
                    num_new[call] = self.tree.new_tokens(before, call)
                    out, times = self.num_out[call], self.times.get(call, 1.0)
                    done = start + model.usage(num_new[call], out, worker, times)
                    # Of an operator, the first query's answer is there before the last one's.
                    first = start + (done - start) / times
                    begin[call], end[call], clock[worker] = start, done, done
                    ready[call] = first + model.delay(out, worker)
                    at[worker] += 1
                    left -= 1
                    moved = True
            if not moved:
                raise ValueError("these orders wait for one another")
        return Timetable(begin, end, orders, num_new)

# SPDX-License-Identifier: Apache-2.0
"""A simulation of sessions over engines, in which placement runs as it is.

An engine does what it has one after the other: encoding and moving of tokens, and its part of the
generated ones. The next call of a session comes a while after the one before it has been answered.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.fleet.policies import Placed, Policy
from benchmarks.fleet.workload import Call, Workload
from benchmarks.harness.stats import percentile

_EVERY = 16  # so many calls are placed for one that is timed


class _Event(NamedTuple):
    """A call that begins, or (without one) work that an engine has done."""

    at: float
    number: int  # of two at a time, the first comes first
    call: Call | None
    rest: Iterator[Call]
    engine: int
    work: float


class Simulation:
    """Sessions that begin at random, `per_second` of them.

    Attributes:
        num_calls, encoded, moved, prompts: calls; tokens that were encoded, moved and in prompts.
        waits: seconds that some calls waited until their engines began with them.
        placing: seconds that placing some calls took.
    """

    def __init__(self, policy: Policy, workload: Workload, per_second: float) -> None:
        self.num_calls = self.encoded = self.moved = self.prompts = 0
        self.waits: list[float] = []
        self.placing: list[float] = []
        self._policy, self._workload, self._per_second = policy, workload, per_second
        self._events: list[_Event] = []
        self._count = 0
        self._free_at = [0.0] * policy.num_engines
        self._busy = [0.0] * policy.num_engines
        self._now = 0.0

    def run(self, num_sessions: int) -> dict[str, Any]:
        """Run sessions to the last one's end; returns a row of numbers."""
        draw = random.Random(1)
        arrival = 0.0
        for number in range(num_sessions):
            arrival += draw.expovariate(self._per_second)
            while self._events and self._events[0].at <= arrival:
                self._step()
            self._next(self._workload.session(number), arrival)
        end = arrival  # what comes later is a fleet that empties
        busy = list(self._busy)
        while self._events:
            self._step()
        mean = sum(busy) / len(busy)
        return {
            "engines": len(busy),
            "sessions": num_sessions,
            "calls": self.num_calls,
            "prompt_tokens": self.prompts,
            "encoded_tokens": self.encoded,
            "moved_tokens": self.moved,
            "busy": round(mean / end, 3),
            "imbalance": round(max(busy) / mean, 3),
            "wait_p50_ms": round(1e3 * percentile(self.waits, 0.5), 1),
            "wait_p95_ms": round(1e3 * percentile(self.waits, 0.95), 1),
            "place_us": round(1e6 * percentile(self.placing, 0.5), 1),
        }

    def _push(self, at: float, call: Call | None, rest: Iterator[Call], *done: Any) -> None:
        self._count += 1
        engine, work = done or (0, 0.0)
        heapq.heappush(self._events, _Event(at, self._count, call, rest, engine, work))

    def _next(self, rest: Iterator[Call], now: float) -> None:
        """Let a session's next call come, if it has one."""
        call = next(rest, None)
        if call is not None:
            self._push(now + call.think, call, rest)

    def _step(self) -> None:
        at, _, call, rest, engine, work = heapq.heappop(self._events)
        if call is None:
            self._policy.loads.add(engine, -work)
            self._next(rest, at)
        else:
            self._place(call, at, rest)

    def _place(self, call: Call, now: float, rest: Iterator[Call]) -> None:
        placed = self._placed(call)
        engine, seconds = placed.engine, placed.seconds
        self._policy.enter(call, engine)
        start = max(now, self._free_at[engine])
        if self.num_calls % _EVERY == 0:
            self.waits.append(start - now)
        self._free_at[engine] = start + seconds
        self._busy[engine] += seconds
        self._policy.loads.add(engine, seconds)
        self.num_calls += 1
        self.prompts += call.num_prompt
        self.encoded += placed.encoded
        self.moved += placed.moved
        self._push(start + seconds, None, rest, engine, seconds)
        if call.own:
            self._policy.close(call.own)

    def _placed(self, call: Call) -> Placed:
        """Place a call; of some it is measured how long that takes."""
        if self.num_calls % _EVERY:
            return self._policy.place(call)
        began = time.perf_counter()  # the clock of the thread may take longer than that
        placed = self._policy.place(call)
        self.placing.append(time.perf_counter() - began)
        return placed

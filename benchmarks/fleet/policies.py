# SPDX-License-Identifier: Apache-2.0
"""Ways to place calls. Each has its memories, by the same rules, and says what a call encodes."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.fleet.rates import CAPACITY, ENCODE, GENERATE, RATES
from benchmarks.fleet.workload import Call
from vllm_choreo.fleet.homes import Homes
from vllm_choreo.fleet.loads import Loads
from vllm_choreo.fleet.placement import Rates, Read, candidates_of, place

_UNLIMITED = 2**60
# Seconds by which the queue of an engine that has a prefix may be longer than that of the idlest.
_IMBALANCE = 1.0


class Placed(NamedTuple):
    """Where a call runs, how many tokens it encodes and moves there, and the engine's seconds."""

    engine: int
    encoded: int
    moved: int
    seconds: float


class Policy(ABC):
    """A way to place calls on engines that are alike.

    Attributes:
        loads: work that waits at each engine, in seconds.
    """

    capacity = CAPACITY

    def __init__(self, num_engines: int) -> None:
        self.loads = Loads(num_engines)
        self.homes = Homes([self.capacity] * num_engines)
        self.num_engines = num_engines
        self._draw = random.Random(0)

    @abstractmethod
    def place(self, call: Call) -> Placed:
        """Choose where a call runs."""

    @abstractmethod
    def enter(self, call: Call, engine: int) -> None:
        """Enter what a call has read, and what it makes, where it runs."""

    @abstractmethod
    def close(self, own: Sequence[int]) -> None:
        """Let a session's messages go, if the engines can be told."""

    def _two(self) -> int:
        """The less loaded of two engines."""
        a, b = self._draw.randrange(self.num_engines), self._draw.randrange(self.num_engines)
        return a if self.loads.queue[a] <= self.loads.queue[b] else b


class Ours(Policy):
    """Messages are reused wherever they lie, and calls go where they are done first."""

    rates: Rates = RATES
    turn = 0

    def place(self, call: Call) -> Placed:
        read = self.homes.read
        self.turn += 1
        reads = [read(key, num_tokens) for key, num_tokens in call.reads]
        new = ENCODE * call.new + GENERATE * call.out
        candidates = self._candidates(reads)
        engine, cost, fetches = place(reads, new, candidates, self.loads.queue, self.rates)
        encoded, moved = call.new, 0
        sizes: Mapping[Hashable, int] = dict(call.reads) if fetches else {}
        for key, source in fetches:
            if source is None:
                encoded += sizes[key]
            else:
                moved += sizes[key]
        return Placed(engine, encoded, moved, cost)

    def _candidates(self, reads: Sequence[Read]) -> list[int]:
        return candidates_of(reads, self.loads, self.turn)

    def close(self, own: Sequence[int]) -> None:
        for key in own:
            self.homes.remove(key)

    def enter(self, call: Call, engine: int) -> None:
        add = self.homes.add
        for key, num_tokens in (*call.reads, call.makes):
            add(key, engine, num_tokens)


class Oracle(Ours):
    """The least that any placement encodes and waits: each message is encoded once, moves are free.

    With memory without end, and moves that take no time, a call costs the same wherever it runs: it
    goes to the idlest engine, and encodes what no engine ever had.
    """

    capacity = _UNLIMITED
    rates = Rates(encode=ENCODE, move=0.0)

    def _candidates(self, reads: Sequence[Read]) -> list[int]:
        return self.loads.least(1)


class TwoChoices(Ours):
    """Messages are reused where they lie, and calls go to the less loaded of two engines."""

    rates = Rates(encode=ENCODE)  # nothing is moved

    def _candidates(self, reads: Sequence[Read]) -> list[int]:
        return [self._two()]


class Prefix(Policy):
    """Prefix caching, behind power of two choices."""

    def place(self, call: Call) -> Placed:
        prefixes = _prefixes(call)
        engine = self._engine(prefixes, call.num_prompt)
        encoded = call.num_prompt
        for key, length, _ in prefixes:
            if engine not in self.homes.of(key):
                break
            encoded = call.num_prompt - length
        return Placed(engine, encoded, 0, ENCODE * encoded + GENERATE * call.out)

    def enter(self, call: Call, engine: int) -> None:
        last: Hashable = ()
        for key, _, num_tokens in _prefixes(call):
            last = key
            self.homes.add(key, engine, num_tokens)
        self.homes.add((last, call.makes.key), engine, call.makes.num_tokens)

    def close(self, own: Sequence[int]) -> None:
        pass  # a cache of prefixes knows of no such end

    def _engine(self, prefixes: Sequence[tuple[Hashable, int, int]], num_prompt: int) -> int:
        return self._two()


class Affinity(Prefix):
    """Prefix caching, behind a router that goes by prefixes unless their engine has much to do.

    As the prefix-aware router of Ray Serve: the longest match, if it is a tenth of the prompt and
    queues are balanced, and else power of two choices.
    """

    def _engine(self, prefixes: Sequence[tuple[Hashable, int, int]], num_prompt: int) -> int:
        queue = self.loads.queue
        least = queue[self.loads.least(1)[0]]
        for key, length, _ in reversed(prefixes):
            homes = self.homes.of(key)
            if homes and length >= num_prompt / 10:
                best = min(homes, key=queue.__getitem__)
                return best if queue[best] - least <= _IMBALANCE else self._two()
        return self._two()


def _prefixes(call: Call) -> list[tuple[Hashable, int, int]]:
    """Prefixes of a prompt that end with a message: a name, its tokens, those of the message."""
    found: list[tuple[Hashable, int, int]] = []
    key: Hashable = ()
    length = 0
    for part in call.reads:
        key = (key, part.key)
        length += part.num_tokens
        found.append((key, length, part.num_tokens))
    return found


POLICIES: dict[str, Callable[[int], Policy]] = {
    "ours": Ours,
    "messages, two choices": TwoChoices,
    "prefixes, affinity": Affinity,
    "prefixes, two choices": Prefix,
    "oracle": Oracle,
}

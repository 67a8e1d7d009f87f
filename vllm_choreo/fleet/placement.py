# SPDX-License-Identifier: Apache-2.0
"""Placement of a call: on the engine where it is done first, by what lies and what waits there.

    done(engine) = queue(engine) + slowness(engine) * (new + sum of missing parents)
                   + apart, on all engines but the one near
    missing      = min(encode it there, move it there from one of its homes)

So what is read often is replicated without a rule that says so: while a home has a queue that is
longer than moving takes, calls go elsewhere, and what they read lies there, too. What is read
seldom keeps the home that it has. All times are given: the function knows no clock, and a
simulation runs it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from vllm_choreo.fleet.loads import Loads

# Engines that are looked at for one call; homes of one encoding of these; idle engines besides.
MAX_CANDIDATES = 10
MAX_HOMES = 4
MAX_IDLE = 4

_ALIKE: Mapping[int, float] = {}

# Fields of a `Read`, as fast as they can be had.
_KEY, _NUM_TOKENS = itemgetter(0), itemgetter(1)


class Read(NamedTuple):
    """An encoding that a call reads.

    Attributes:
        key: name of the encoding.
        num_tokens: tokens to be encoded, or moved, where it does not lie.
        homes: engines where it lies; better a set.
        order: the same ones in an order, of which some are looked at; empty: `homes`, if they are
            few.
    """

    key: Hashable
    num_tokens: float
    homes: Collection[int]
    order: Sequence[int] = ()


@dataclass(frozen=True)
class Rates:
    """Measured costs, in seconds or any other unit of work that queues are counted in.

    Attributes:
        encode: cost of encoding a token.
        move: cost of moving a token's keys and values between engines; infinite: nothing is moved.
        move_start: cost of a move besides that of its tokens.
        slowness: factor of an engine's costs, by its number; 1 for those that are left out.
    """

    encode: float
    move: float = math.inf
    move_start: float = 0.0
    slowness: Mapping[int, float] = field(default_factory=lambda: _ALIKE)

    def is_moved(self, num_tokens: float) -> bool:
        """Return whether so many tokens are moved, where there is a home, rather than encoded."""
        return self.move_start + self.move * num_tokens < self.encode * num_tokens


class Near(NamedTuple):
    """An engine where what a call makes is likely to be read.

    Attributes:
        engine: number of the engine.
        apart: cost of bringing there together what is read together, if the call runs elsewhere.
    """

    engine: int
    apart: float


class Fetch(NamedTuple):
    """An encoding that is missing where the call runs.

    Attributes:
        key: name of the encoding.
        source: engine from which it is moved; None: it is encoded.
    """

    key: Hashable
    source: int | None


class Placement(NamedTuple):
    """Engine of a call, and what it takes there.

    Attributes:
        engine: number of the engine.
        cost: work that the call adds to the engine's queue.
        fetches: encodings that are missing there, in the order of the reads, each once.
    """

    engine: int
    cost: float
    fetches: tuple[Fetch, ...]


def place(
    reads: Sequence[Read],
    new: float,
    candidates: Iterable[int],
    queue: Sequence[float],
    rates: Rates,
    near: Near | None = None,
) -> Placement:
    """Choose the engine on which a call is done first; of equals the first of the candidates.

    Args:
        reads: encodings that it reads; one that is read twice may be listed twice.
        new: cost of the call's own tokens, wherever it runs.
        candidates: numbers of engines to choose from; see `candidates_of`.
        queue: work that waits at each engine, by its number.
        rates: measured costs.
        near: engine where others are likely to read what the call makes, if there is one.

    Raises:
        ValueError: there is no candidate.
    """
    reads = _distinct(reads)
    total, saved = _missing(reads, candidates, rates)
    total += new
    slowness = rates.slowness
    best, best_done, best_work = -1, math.inf, 0.0
    for engine, less in saved.items():
        work = total - less
        if slowness:
            work *= slowness.get(engine, 1.0)
        done = queue[engine] + work
        if near is not None and engine != near.engine:
            done += near.apart
        if done < best_done:
            best, best_done, best_work = engine, done, work
    if best < 0:
        raise ValueError("a call is placed on one of the candidates, and there is none")
    fetches = [
        Fetch(read.key, source_of(read, queue, rates)) for read in reads if best not in read.homes
    ]
    return Placement(best, best_work, tuple(fetches))


def _missing(
    reads: Sequence[Read], candidates: Iterable[int], rates: Rates
) -> tuple[float, dict[int, float]]:
    """Cost of all that is read where nothing of it lies, and what each candidate saves of it."""
    encode, move, move_start = rates.encode, rates.move, rates.move_start
    saved, total = dict.fromkeys(candidates, 0.0), 0.0
    for _, num_tokens, homes, _ in reads:
        cost = encode * num_tokens
        if homes:
            moved = move_start + move * num_tokens
            if moved < cost:
                cost = moved
            if len(homes) < len(saved):
                for engine in homes:
                    if engine in saved:
                        saved[engine] += cost
            else:
                for engine in saved:
                    if engine in homes:
                        saved[engine] += cost
        total += cost
    return total, saved


def candidates_of(reads: Sequence[Read], loads: Loads, turn: int = 0) -> list[int]:
    """Engines that may be the best for a call: some homes of what it reads, and the idlest.

    What many read lies on many engines: a few of them, other ones in each turn, find an idle one
    among them nearly as well as all would. Homes of what has most tokens come first.

    Args:
        loads: queues of the engines.
        turn: number that changes from call to call.
    """
    found = dict.fromkeys(loads.least(MAX_IDLE))
    for _, _, homes, order in sorted(reads, key=_NUM_TOKENS, reverse=True):
        some: Iterable[int] = homes
        if len(homes) > MAX_HOMES:
            start = turn % (len(order) - MAX_HOMES + 1) if order else 0
            some = order[start : start + MAX_HOMES] if order else islice(homes, MAX_HOMES)
        for engine in some:
            found[engine] = None
        if len(found) >= MAX_CANDIDATES:
            break
    return list(found)


def _distinct(reads: Sequence[Read]) -> Sequence[Read]:
    """Reads of which none names the key of another."""
    if len(reads) < 2 or len(set(map(_KEY, reads))) == len(reads):
        return reads
    return list({read.key: read for read in reads}.values())


def source_of(read: Read, queue: Sequence[float], rates: Rates) -> int | None:
    """Engine from which an encoding is moved: of some of its homes, the one with least to do.

    None: it lies nowhere, or is rather encoded.
    """
    homes = read.homes
    if not homes or not rates.is_moved(read.num_tokens):
        return None
    if len(homes) == 1:
        return next(iter(homes))
    best, least = -1, math.inf
    for engine in islice(homes, MAX_HOMES):  # `min` with a key takes three times as long
        waits = queue[engine]
        if waits < least or (waits == least and (best < 0 or engine < best)):
            best, least = engine, waits
    return best

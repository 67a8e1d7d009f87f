# SPDX-License-Identifier: Apache-2.0
"""Placement against a search over all engines, and the index of homes against one made anew."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Hashable

import pytest

from vllm_choreo.errors import LimitError
from vllm_choreo.fleet.homes import Homes
from vllm_choreo.fleet.loads import Loads
from vllm_choreo.fleet.placement import Fetch, Near, Rates, Read, candidates_of, place


def _reads(draw: random.Random, num_engines: int) -> list[Read]:
    return [
        Read(
            f"m{number}",
            draw.randrange(1, 5000),
            set(draw.sample(range(num_engines), draw.randrange(0, min(4, num_engines)))),
        )
        for number in range(draw.randrange(0, 6))
    ]


def _done(engine: int, reads: list[Read], new: float, queue: list[float], rates: Rates) -> float:
    """When a call is done on an engine, by the definition."""
    work = new
    for read in {read.key: read for read in reads}.values():
        if engine not in read.homes:
            encoded = rates.encode * read.num_tokens
            moved = rates.move_start + rates.move * read.num_tokens
            work += min(encoded, moved) if read.homes else encoded
    return queue[engine] + rates.slowness.get(engine, 1.0) * work


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_is_the_one_where_the_call_is_done_first(seed: int) -> None:
    draw = random.Random(seed)
    num_engines = draw.randrange(1, 9)
    queue = [draw.choice([0.0, draw.random() * 3]) for _ in range(num_engines)]
    move = draw.choice([math.inf, 0.0, 1e-5])
    rates = Rates(1e-4, move, draw.choice([0.0, 0.05]), draw.choice([{}, {0: 0.5}]))
    reads = _reads(draw, num_engines)
    near = draw.choice([None, Near(draw.randrange(num_engines), draw.random())])
    found = place(reads, 0.2, range(num_engines), queue, rates, near)

    def late(engine: int) -> float:
        is_apart = near is not None and engine != near.engine
        return _done(engine, reads, 0.2, queue, rates) + (near.apart if near and is_apart else 0)

    assert late(found.engine) == pytest.approx(min(map(late, range(num_engines))))
    done = _done(found.engine, reads, 0.2, queue, rates)
    assert queue[found.engine] + found.cost == pytest.approx(done)
    missing = [read for read in reads if found.engine not in read.homes]
    assert list(found.fetches) == [_fetch(read, queue, rates) for read in missing]


def _fetch(read: Read, queue: list[float], rates: Rates) -> Fetch:
    """What is done about a message that is missing, by the definition."""
    is_moved = rates.move_start + rates.move * read.num_tokens < rates.encode * read.num_tokens
    homes = sorted((queue[engine], engine) for engine in read.homes if is_moved)
    return Fetch(read.key, homes[0][1] if homes else None)


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_the_idlest_and_homes_of_the_longest(seed: int) -> None:
    draw = random.Random(seed)
    num_engines = draw.choice([1, 3, 12, 40])
    homes, loads = Homes([10**6] * num_engines), Loads(num_engines)
    changes = list(range(num_engines))
    sizes = {f"m{number}": draw.randrange(1, 500) for number in range(8)}
    for key, num_tokens in sizes.items():
        for engine in draw.sample(range(num_engines), draw.randrange(1 + min(num_engines, 20))):
            homes.add(key, engine, num_tokens)
    for turn in range(200):
        changed = draw.randrange(num_engines)
        loads.put(changed, draw.choice([0.0, 1.0, draw.random(), math.inf]))
        changes[changed] = num_engines + turn
        reads = [homes.read(key, n) for key, n in draw.sample(list(sizes.items()), 3)]
        idlest = sorted(range(num_engines), key=lambda e: (loads.queue[e], changes[e]))[:4]
        expected = set(idlest)
        for read in sorted(reads, key=lambda read: -read.num_tokens):
            start = turn % max(1, len(read.order) - 3)
            expected |= set(read.order[start : start + 4] if len(expected) < 10 else ())
        found = candidates_of(reads, loads, turn)
        assert found[: len(idlest)] == idlest
        assert len(found) == len(expected) and set(found) == expected


def test_what_is_missing_is_moved_if_that_is_cheaper() -> None:
    rates = Rates(encode=1e-3, move=1e-4, move_start=0.1)
    reads = [Read("long", 1000, {1, 2}), Read("short", 50, {1}), Read("nowhere", 9, set())]
    found = place(reads, 0.0, [0], [0.0, 5.0, 4.0], rates)
    assert found.fetches == (Fetch("long", 2), Fetch("short", None), Fetch("nowhere", None))
    assert found.cost == pytest.approx(0.1 + 0.1 + 0.05 + 0.009)


def test_a_message_that_is_read_twice_is_fetched_once() -> None:
    read = Read("m", 100, set())
    found = place([read, read], 0.0, [0], [0.0], Rates(1.0))
    assert found.cost == 100 and found.fetches == (Fetch("m", None),)


def test_without_an_engine_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="there is none"):
        place([], 0.0, [], [], Rates(1.0))


def test_a_hot_message_is_replicated_and_a_cold_one_is_not() -> None:
    """Of 400 calls at once, all read `hot`, and each 10th one of ten cold messages."""
    homes, loads, rates = Homes([10_000] * 8), Loads(8), Rates(encode=1e-3)
    for number in range(400):
        keys = ["hot"] if number % 10 else ["hot", f"cold{number // 10 % 10}"]
        reads = [homes.read(key, 500) for key in keys]
        found = place(reads, 0.05, candidates_of(reads, loads, number), loads.queue, rates)
        loads.add(found.engine, found.cost)
        for key in keys:
            homes.add(key, found.engine, 500)
        if number % 2:  # as much is done as comes
            for engine in range(8):
                loads.add(engine, -0.025)
    assert len(homes.of("hot")) == 8
    assert sum(len(homes.of(f"cold{number}")) for number in range(10)) <= 20


# -- queues ----------------------------------------------------------------------------------------


def test_the_idlest_engines_are_found_after_any_changes() -> None:
    draw, loads = random.Random(1), Loads(20)
    for _ in range(3000):
        engine = draw.randrange(20)
        loads.add(engine, draw.choice([0.5, -0.5, 1.0, -1.0]))
        found = loads.least(4)
        assert len(set(found)) == 4
        assert [loads.queue[e] for e in found] == sorted(loads.queue)[:4]


def test_engines_with_equal_queues_take_turns() -> None:
    loads = Loads(5)
    taken = []
    for _ in range(15):
        (engine,) = loads.least(1)
        taken.append(engine)
        loads.add(engine, 1.0)
        loads.add(engine, -1.0)
    assert taken == [0, 1, 2, 3, 4] * 3


def test_placement_of_calls_without_parents_is_even() -> None:
    """At most one engine has something to do when each call comes."""
    loads, rates, count = Loads(7), Rates(1.0), [0] * 7
    for number in range(700):
        found = place([], 1.0, candidates_of([], loads, number), loads.queue, rates)
        count[found.engine] += 1
        loads.add(found.engine, found.cost)
        loads.add(found.engine, -found.cost)
    assert set(count) == {100}


# -- homes -----------------------------------------------------------------------------------------


class _Recount:
    """Homes, counted anew from what was told."""

    def __init__(self) -> None:
        self.lies: dict[tuple[Hashable, int], tuple[int, str]] = {}

    def check(self, homes: Homes, num_engines: int, room: int) -> None:
        for engine in range(num_engines):
            used = sum(n for (_, where), (n, _) in self.lies.items() if where == engine)
            assert homes.used(engine) == used <= room
        keys = {key for key, _ in self.lies}
        assert len(homes) == len(keys)
        for key in keys:
            where = {engine for k, engine in self.lies if k == key}
            read = homes.read(key, 1)
            assert read.homes == homes.of(key) == set(read.order) == where
            assert len(read.order) == len(where)


@pytest.mark.parametrize("tenant_share", [1.0, 0.4])
def test_homes_are_those_of_a_recount(tenant_share: float) -> None:
    draw, recount = random.Random(2), _Recount()
    homes = Homes([1000] * 3, tenant_share=tenant_share)
    for _ in range(1500):
        key, engine = f"k{draw.randrange(40)}", draw.randrange(3)
        size, tenant = 20 + 10 * int(key[1:]) % 90, f"t{int(key[1:]) % 3}"
        match draw.randrange(20):
            case 0:
                homes.remove(key)
                recount.lies = {at: what for at, what in recount.lies.items() if at[0] != key}
            case 1:
                lost = homes.remove_engine(engine)
                assert all(not homes.of(key) for key in lost)
                recount.lies = {at: what for at, what in recount.lies.items() if at[1] != engine}
            case _:
                recount.lies.setdefault((key, engine), (size, tenant))
                for dropped in homes.add(key, engine, size, tenant):
                    del recount.lies[tuple(dropped)]
        recount.check(homes, 3, 1000)
        if tenant_share < 1:
            for name in ("t0", "t1", "t2"):
                assert sum(n for n, t in recount.lies.values() if t == name) <= 1200


def test_the_oldest_goes_first_and_a_copy_before_it() -> None:
    homes = Homes([300, 300])
    for key in ("a", "b", "c"):
        homes.add(key, 0, 100)
    homes.add("a", 0, 100)  # used again
    assert homes.add("d", 0, 100) == [("b", 0)]
    homes.add("d", 1, 100)
    assert homes.add("e", 0, 100) == [("d", 0)]  # which lies elsewhere, too
    assert homes.of("c") == {0}


def test_pins_count_over_the_fleet() -> None:
    homes = Homes([300, 300], pinned_share=0.5)
    for key in ("a", "b", "c", "d"):
        homes.add(key, int(key in "cd"), 100)
    homes.pin(["a", "b", "c", "a", "gone"])
    with pytest.raises(LimitError, match="may hold 300 tokens"):
        homes.pin(["d"])
    homes.add("e", 0, 100)
    assert homes.add("f", 0, 100) == [("e", 0)]
    assert homes.of("a") == homes.of("b") == {0}
    homes.unpin(["a"])
    homes.pin(["d"])
    assert homes.remove_engine(0) == ["f", "a", "b"] or not homes.of("b")
    assert homes.of("c") == {1}


def test_a_pinned_message_may_lose_its_copies() -> None:
    homes = Homes([200, 200])
    for engine in (0, 1):
        homes.add("a", engine, 100)
    homes.pin(["a"])
    homes.add("b", 0, 100)
    assert homes.add("c", 0, 100) == [("a", 0)]
    assert homes.of("a") == {1}


# -- time ------------------------------------------------------------------------------------------


def _num_calls_of_placing(num_engines: int) -> float:
    """Function calls per placed call that reads 8 messages, one of them on every engine."""
    homes, loads, rates = Homes([10**9] * num_engines), Loads(num_engines), Rates(1e-4, 1e-5, 1e-3)
    for engine in range(num_engines):
        homes.add("hot", engine, 500)
        loads.add(engine, engine % 7)
    draw = random.Random(3)
    for number in range(2000):
        homes.add(number, draw.randrange(num_engines), 300)
    keys = [["hot", *(draw.randrange(2000) for _ in range(7))] for _ in range(50)]
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: counts.update([event]))
    try:
        for turn, named in enumerate(keys):
            reads = [homes.read(key, 300) for key in named]
            found = place(reads, 0.1, candidates_of(reads, loads, turn), loads.queue, rates)
            loads.add(found.engine, found.cost)
    finally:
        sys.setprofile(None)
    return (counts["call"] + counts["c_call"]) / len(keys)


def test_placing_takes_no_longer_the_more_engines_there_are() -> None:
    """In microseconds it is measured by `python -m benchmarks.fleet`."""
    few, many = map(_num_calls_of_placing, (10, 1000))
    assert many < 1.25 * few and many < 400, (few, many)

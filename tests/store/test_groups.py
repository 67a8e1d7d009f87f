# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: which blocks of a message a call sees, which it keeps, and who holds which."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.test_store import SIZE, SIZES, Pool
from vllm_choreo.semantics.positions import CallPlan, ParentPlan
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import CacheGroups
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.stats import stats
from vllm_choreo.store.store import MessageStore

WINDOWS = (None, 6, 6, 1)


@given(
    length=st.integers(1, 40),
    data=st.data(),
    offset=st.integers(0, 60),
    new_offset=st.integers(0, 60),
    window=st.integers(1, 30),
    size=st.integers(1, 9),
)
def test_what_a_call_sees_is_by_its_definition(
    length: int, data: st.DataObject, offset: int, new_offset: int, window: int, size: int
) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    groups = CacheGroups(size, (None, window))
    full, near = groups.seen(ParentPlan("m", start, stop, offset), new_offset)
    assert set(full) == {token // size for token in range(start, stop)}
    # The call's first token, at `new_offset`, sees token `start + n` at `offset + n`.
    tokens = range(start, stop)
    seen = [t for t in tokens if new_offset - (offset + t - start) < window]
    assert set(near) == {token // size for token in seen}


@given(length=st.integers(1, 60), window=st.integers(1, 30), size=st.integers(1, 9))
def test_what_is_kept_is_what_is_seen_from_right_behind_and_from_the_last_block(
    length: int, window: int, size: int
) -> None:
    full, first = CacheGroups(size, (None, window)).kept(length)
    num_blocks, last_block = -(-length // size), (length - 1) // size
    needed = {t // size for at in (length, last_block * size) for t in range(at) if at - t < window}
    assert full == 0 and needed | {last_block} == set(range(first, num_blocks))
    assert num_blocks - first <= -(-(window - 1) // size) + 1


@given(
    start=st.integers(0, 20),
    first=st.integers(0, 30),
    num_tokens=st.integers(1, 20),
    window=st.integers(1, 30),
    size=st.integers(1, 9),
)
def test_what_a_run_sees_of_its_message_is_by_its_definition(
    start: int, first: int, num_tokens: int, window: int, size: int
) -> None:
    first += start
    stop = first + num_tokens
    groups = CacheGroups(size, (None, window))
    full, near = groups.read_by_run((start, stop), num_tokens)
    run = range(first, stop)
    seen = {t for at in run for t in range(start, at + 1) if at - t < window}
    assert set(near) == {token // size for token in seen}
    assert set(full) == {token // size for token in range(start, stop)}


# -- who holds what ------------------------------------------------------------------------------


@pytest.fixture
def store() -> MessageStore:
    made = MessageStore(Pool(), SIZE, windows=WINDOWS)
    made.begin_step()
    return made


def _pool(store: MessageStore) -> Pool:
    pool = store.residency.pool
    assert isinstance(pool, Pool)
    return pool


def _message(store: MessageStore, name: str, num_tokens: int) -> Encoding:
    encoding = store.create("s", name).own
    encoding.token_ids, encoding.plan = [7] * num_tokens, CallPlan((), 0, 0, True)
    store.identify(encoding)
    store.duplicates.add(encoding)
    return encoding


def _encode(store: MessageStore, encoding: Encoding) -> list[list[Any]]:
    """What a request does: run on its own blocks, have them held, end."""
    pool = _pool(store)
    own = [pool.new(-(-encoding.num_tokens // SIZE)) for _ in WINDOWS]
    store.hold(encoding, own, encoding.num_tokens)
    for of_group in own:
        pool.free_blocks(reversed(of_group))
    return own


def _gaps(encoding: Encoding) -> list[str]:
    return ["".join(".#"[not block.is_null] for block in held) for held in encoding.blocks]


def test_a_message_keeps_what_is_seen_right_behind_it(store: MessageStore) -> None:
    encoding = _message(store, "m", 5 * SIZE + 1)
    _encode(store, encoding)
    # From token 20 on the last block is encoded: it sees tokens 15 to 20 with a window of 6.
    assert _gaps(encoding) == ["######", "...###", "...###", ".....#"]
    assert encoding.num_blocks == 13 == store.groups.num_kept_blocks(encoding.num_tokens)
    assert encoding.is_resident and not encoding.has([range(0, 6), range(2, 6), *[range(0)] * 2])
    assert encoding.has([range(0, 6), range(3, 6), *[range(0)] * 2])
    found = stats(store, SIZES)
    assert (found["num_blocks"], found["num_window_blocks"]) == (13, 7)
    assert found["num_blocks_by_group"] == [6, 3, 3, 1]
    assert found["windows"] == list(WINDOWS)
    (message,) = found["messages"]
    assert message["num_blocks_by_group"] == [6, 3, 3, 1]
    assert message["bytes_by_group"] == [600, 300, 300, 100]
    blocks = [(b["group"], b["position"]) for b in message["blocks"]]
    assert blocks[6:10] == [(1, 12), (1, 16), (1, 20), (2, 12)]
    store.residency.check()
    store.evict(encoding)
    assert all(block.ref_cnt == 0 for block in _pool(store).blocks)


def test_what_somebody_waits_for_is_kept_until_he_has_it(store: MessageStore) -> None:
    encoding, residency = _message(store, "m", 5 * SIZE), store.residency
    residency.wait_for([encoding, encoding])
    _encode(store, encoding)
    assert _gaps(encoding) == ["#####"] * 4
    residency.read([encoding])
    assert _gaps(encoding) == ["#####"] * 4
    residency.leave([encoding], reading=False)
    assert _gaps(encoding) == ["#####", "..###", "..###", "....#"]
    residency.leave([encoding], reading=True)
    residency.check()


def test_gaps_are_closed_for_who_asks_and_opened_again_for_room(store: MessageStore) -> None:
    encoding, residency, pool = _message(store, "m", 5 * SIZE), store.residency, _pool(store)
    _encode(store, encoding)
    before = encoding.held_blocks
    residency.wait_for([encoding, encoding])
    residency.read([encoding])  # nobody else's place changes under him
    encoding.is_kept_whole = True
    anew = [pool.new(5) for _ in WINDOWS]
    closed = store.fill(encoding, anew)
    for of_group in anew:
        pool.free_blocks(reversed(of_group))
    assert closed == [(1, 0), (1, 1), (2, 0), (2, 1), *((3, n) for n in range(4))]
    assert _gaps(encoding) == ["#####"] * 4 and set(before) <= set(encoding.held_blocks)
    assert not residency.trim_one(()), "a call waits for it"
    residency.read([encoding])
    assert _gaps(encoding) == ["#####"] * 4
    assert not residency.trim_one({encoding})
    assert store.evict_one([], waiting_too=False)
    assert _gaps(encoding) == ["#####", "..###", "..###", "....#"]
    assert encoding.held_blocks == before and store.totals["evicted_messages"] == 0
    residency.leave([encoding] * 2, reading=True)
    residency.check()


def test_host_memory_has_the_gaps_of_what_was_evicted(store: MessageStore) -> None:
    tier = store.tier = HostTier(60, store.residency.block_copies)
    encoding, pool = _message(store, "m", 5 * SIZE + 1), _pool(store)

    def next_step() -> None:
        store.take_block_copies()
        store.begin_step()

    def restore() -> int:
        places = tier.restorable(encoding)
        blocks = pool.new(len(places))
        store.residency.wait_for([encoding])
        store.restore(encoding, blocks)
        pool.free_blocks(blocks)
        loads = store.take_block_copies().loads
        saved = tier.find(encoding).blocks
        assert {(saved[g][i], encoding.blocks[g][i].block_id) for g, i in places} == {*loads}
        store.begin_step()
        return len(places)

    whole, kept = store.groups.whole(encoding.num_tokens), store.groups.held(encoding.num_tokens)
    _encode(store, encoding)
    next_step()
    store.evict(encoding)
    next_step()
    assert tier.num_used == 13 and tier.completes(encoding, kept)
    assert tier.completes(encoding, None) and not tier.completes(encoding, whole)
    assert restore() == 13 and _gaps(encoding) == ["######", "...###", "...###", ".....#"]
    assert not tier.completes(encoding, None), "there is nothing to load"
    # What was encoded again as a whole takes the place of the part.
    store.evict(encoding)
    _encode(store, encoding)
    next_step()
    store.evict(encoding)
    next_step()
    assert tier.num_used == 24 and tier.completes(encoding, whole)
    store.residency.leave([encoding], reading=False)
    assert restore() == 24 and encoding.has(whole)
    store.residency.leave([encoding], reading=False)
    assert _gaps(encoding)[1] == "...###" and tier.completes(encoding, whole)
    store.residency.wait_for([encoding])
    store.residency.read([encoding])
    assert restore() == 11 and encoding.has(whole), "gaps close while somebody reads"
    store.residency.check()


def test_what_is_shared_can_be_gone_on_from(store: MessageStore) -> None:
    first, second = _message(store, "a", 5 * SIZE), _message(store, "b", 5 * SIZE)
    _encode(store, first)
    store.share(second)
    assert second.num_encoded == 4 * SIZE
    # Token 16 sees tokens 11 to 16 with a window of 6.
    assert _gaps(second) == ["####", "..##", "..##", "...."]
    assert second.blocks[1][2:] == first.blocks[1][2:4]
    third = _message(store, "c", 5 * SIZE)
    store.residency.open_gaps(first, [(1, 2)])
    store.residency.drop(second)
    store.share(third)
    assert not third.num_encoded, "its next token would miss one"
    store.residency.check()


def test_an_open_message_keeps_all_until_it_is_known_where_it_ends(store: MessageStore) -> None:
    encoding = _message(store, "m", 6 * SIZE)
    encoding.message.open_report = {"num_tokens": 24, "encoded_tokens": 24}
    _encode(store, encoding)
    assert _gaps(encoding) == ["######"] * 4
    store.end(encoding.message, 3 * SIZE)
    assert _gaps(encoding) == ["###", "###", "###", "..#"] and encoding.is_resident
    store.residency.check()


@settings(max_examples=60)
@given(data=st.data())
def test_references_are_counted_whatever_happens(data: st.DataObject) -> None:
    """In any order of holding, waiting, reading, trimming and filling."""
    store = MessageStore(Pool(), SIZE, windows=WINDOWS)
    store.begin_step()
    residency, pool = store.residency, _pool(store)
    messages = [_message(store, name, n) for name, n in (("a", 7), ("b", 24), ("c", 33))]
    steps = ("hold", "wait", "read", "leave", "trim", "fill", "evict", "room", "whole", "cut")
    for _ in range(data.draw(st.integers(1, 25))):
        m, step = data.draw(st.sampled_from(messages)), data.draw(st.sampled_from(steps))
        if step == "hold" and not m.num_readers:
            _encode(store, m)
        elif step == "wait":
            residency.wait_for([m])
        elif step == "read" and m.num_waiting and m.is_resident:
            residency.read([m])
        elif step == "leave" and (m.num_waiting or m.num_readers):
            residency.leave([m], reading=bool(m.num_readers))
        elif step == "trim" and m.blocks:
            residency.trim(m)
        elif step == "fill" and m.is_resident:
            anew = [pool.new(-(-m.num_tokens // SIZE)) for _ in WINDOWS]
            store.fill(m, anew)
            for of_group in anew:
                pool.free_blocks(reversed(of_group))
            assert len(m.held_blocks) == sum(map(len, m.blocks))
        elif step == "evict" and not m.num_readers:
            store.evict(m)
        elif step == "room":
            store.evict_one([{m}], waiting_too=data.draw(st.booleans()))
        elif step == "whole":
            m.is_kept_whole = True
        elif step == "cut" and m.is_resident and not m.num_readers:
            residency.cut(m, m.num_tokens - 1)
            m.token_ids = (m.token_ids and m.token_ids[:-1]) or [7]
            store.evict(m)
        residency.check()
        held = [block for one in messages for block in one.held_blocks]
        assert all(block.ref_cnt == held.count(block) for block in pool.blocks)

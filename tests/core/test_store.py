# SPDX-License-Identifier: Apache-2.0
"""The store of messages over a pool that counts: every reference taken is given back once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_choreo.errors import NameTakenError, UnknownMessageError
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.stats import stats
from vllm_choreo.store.store import Message, MessageStore

SIZE = 4


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """Counts as vLLM's does, and refuses to count below zero."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.freed: list[int] = []

    def new(self, count: int) -> list[Block]:
        """Blocks as a running request has them: one reference, its own."""
        made = [Block(len(self.blocks) + i, 1) for i in range(count)]
        self.blocks += made
        return made

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.freed.append(block.block_id)


def _message(store: MessageStore, name: str, num_tokens: int, session: str = "s") -> Message:
    message = store.create(session, name)
    message.token_ids, message.plan = [7] * num_tokens, CallPlan((), 0, 0, True)
    return message


def _encode(store: MessageStore, message: Message, num_encoded: int | None = None) -> None:
    """What a request does: run on its own blocks, have them held, end."""
    count = message.num_tokens if num_encoded is None else num_encoded
    own = store.pool.new(-(-message.num_tokens // SIZE))  # type: ignore[attr-defined]
    store.hold(message, own, count)
    store.pool.free_blocks(reversed(own))


@pytest.fixture
def store() -> MessageStore:
    return MessageStore(Pool(), SIZE)


def test_a_message_is_known_in_its_session_only(store: MessageStore) -> None:
    message = _message(store, "m", 5)
    assert store.get("s", "m") is message
    for session, name in (("s", "n"), ("other", "m")):
        with pytest.raises(UnknownMessageError):
            store.get(session, name)
    with pytest.raises(NameTakenError):
        store.create("s", "m")
    assert store.create("other", "m") is not message


def test_held_blocks_outlive_the_request_and_return_tail_first(store: MessageStore) -> None:
    message = _message(store, "m", 9)
    _encode(store, message)
    assert [(block.block_id, block.ref_cnt) for block in message.blocks] == [(0, 1), (1, 1), (2, 1)]
    assert message.is_resident and store.pool.freed == []  # type: ignore[attr-defined]
    store.evict(message)
    assert not message.is_resident and message.is_known
    assert store.pool.freed == [2, 1, 0]  # type: ignore[attr-defined]
    assert store.totals["evicted_messages"] == 1
    store.evict(message)
    assert store.totals["evicted_messages"] == 1


def test_a_block_without_an_encoded_token_is_not_held(store: MessageStore) -> None:
    message = _message(store, "m", 9)
    _encode(store, message, 8)  # the ninth is sampled, but has no key yet
    assert [block.block_id for block in message.blocks] == [0, 1]
    assert not message.is_resident
    assert stats(store)["messages"][0]["blocks"][1]["num_valid_slots"] == 4


def test_the_least_recently_used_idle_message_goes_first(store: MessageStore) -> None:
    a, b, c, d = (_message(store, name, 4) for name in "abcd")
    for message in (a, b, c, d):
        _encode(store, message)
    store.use(a)
    b.num_readers = 1  # never
    d.num_waiting = 1  # only if nothing else is left
    assert store.evict_one([], False) and not c.is_resident
    assert not store.evict_one([{a}], False)
    assert store.evict_one([], False) and not a.is_resident
    assert not store.evict_one([], False)
    assert store.evict_one([], True) and not d.is_resident
    assert not store.evict_one([], True) and b.is_resident


def test_of_protected_messages_those_needed_last_go_first(store: MessageStore) -> None:
    now, later = _message(store, "now", 4), _message(store, "later", 4)
    for message in (now, later):
        _encode(store, message)
        message.num_waiting = 1
    assert store.evict_one([{now}, {later}], True)
    assert now.is_resident and not later.is_resident
    assert not store.evict_one([{now}, {later}], True)


def test_a_freed_message_stays_until_its_last_reader_ends(store: MessageStore) -> None:
    message = _message(store, "m", 4)
    _encode(store, message)
    message.num_readers = 1
    store.free(message)
    assert message.is_resident
    with pytest.raises(UnknownMessageError):
        store.get("s", "m")
    message.num_readers = 0
    store.settle(message)
    assert not message.blocks and store.pool.freed == [0]  # type: ignore[attr-defined]


_STEP = st.tuples(
    st.sampled_from(["encode", "part", "evict", "read", "leave", "free", "settle", "make_room"]),
    st.integers(0, 3),
)


@settings(max_examples=200)
@given(st.lists(_STEP, max_size=40))
def test_whatever_happens_references_are_balanced(steps: list[tuple[str, int]]) -> None:
    pool = Pool()
    store = MessageStore(pool, SIZE)
    messages = [_message(store, f"m{i}", 3 + 4 * i) for i in range(4)]
    read: list[tuple[Message, list[Block]]] = []
    for action, number in steps:
        message = messages[number]
        if action in ("encode", "part") and not message.freed:
            _encode(store, message, 1 if action == "part" else None)
        elif action == "evict" and not message.num_readers:
            store.evict(message)
        elif action == "read" and message.is_resident:
            pool.touch(message.blocks)
            message.num_readers += 1
            read.append((message, list(message.blocks)))
        elif action == "leave" and read:
            left, blocks = read.pop(number % len(read))
            pool.free_blocks(blocks)
            left.num_readers -= 1
            store.settle(left)
        elif action == "free" and not message.freed:
            store.free(message)
        elif action == "settle":
            store.settle(message)
        elif action == "make_room":
            store.evict_one([], False)
        held = [b for m in messages for b in m.blocks] + [b for _, bs in read for b in bs]
        assert all(block.ref_cnt == held.count(block) for block in pool.blocks)
        assert set(store.holding()) == {m for m in messages if m.blocks}
    for left, blocks in read:
        pool.free_blocks(blocks)
        left.num_readers -= 1
    for message in messages:
        store.free(message)
        store.settle(message)
    assert all(block.ref_cnt == 0 for block in pool.blocks)
    assert stats(store)["num_messages"] == 0

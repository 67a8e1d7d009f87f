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
from vllm_choreo.store.encoding import Encoding, Patch
from vllm_choreo.store.stats import MemorySizes, stats
from vllm_choreo.store.store import MessageStore

SIZE = 4
SIZES = MemorySizes(block=100, state=7)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """Counts as vLLM's does, and refuses to count below zero."""

    def __init__(self) -> None:
        self.null_block = Block(-1, is_null=True)
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


def _message(store: MessageStore, name: str, num_tokens: int, session: str = "s") -> Encoding:
    """The encoding of a new message."""
    encoding = store.create(session, name).own
    encoding.token_ids, encoding.plan = [7] * num_tokens, CallPlan((), 0, 0, True)
    return encoding


def _encode(store: MessageStore, message: Encoding, num_encoded: int | None = None) -> None:
    """What a request does: run on its own blocks, have them held, end."""
    count = message.num_tokens if num_encoded is None else num_encoded
    own = _pool(store).new(-(-message.num_tokens // SIZE))
    store.hold(message, [own], count)
    _pool(store).free_blocks(reversed(own))


def _read(store: MessageStore, encoding: Encoding) -> None:
    store.residency.wait_for([encoding])
    store.residency.read([encoding])


def _pool(store: MessageStore) -> Pool:
    pool = store.residency.pool
    assert isinstance(pool, Pool)
    return pool


@pytest.fixture
def store() -> MessageStore:
    return MessageStore(Pool(), SIZE)


def test_a_message_is_known_in_its_session_only(store: MessageStore) -> None:
    message = _message(store, "m", 5)
    assert store.get("s", "m") is message.message
    for session, name in (("s", "n"), ("other", "m")):
        with pytest.raises(UnknownMessageError):
            store.get(session, name)
    with pytest.raises(NameTakenError):
        store.create("s", "m")
    assert store.create("other", "m") is not message.message


def test_held_blocks_outlive_the_request_and_return_tail_first(store: MessageStore) -> None:
    message = _message(store, "m", 9)
    _encode(store, message)
    assert [(block.block_id, block.ref_cnt) for block in message.held_blocks] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert message.is_resident and _pool(store).freed == []
    store.evict(message)
    assert not message.is_resident and message.is_known
    assert _pool(store).freed == [2, 1, 0]
    assert store.totals["evicted_messages"] == 1
    store.evict(message)
    assert store.totals["evicted_messages"] == 1


def test_a_block_without_an_encoded_token_is_not_held(store: MessageStore) -> None:
    message = _message(store, "m", 9)
    _encode(store, message, 8)  # the ninth is sampled, but has no key yet
    assert [block.block_id for block in message.held_blocks] == [0, 1]
    assert not message.is_resident
    assert stats(store, SIZES)["messages"][0]["blocks"][1]["num_valid_slots"] == 4


def test_the_least_recently_used_idle_message_goes_first(store: MessageStore) -> None:
    a, b, c, d = (_message(store, name, 4) for name in "abcd")
    for message in (a, b, c, d):
        _encode(store, message)
    store.residency.use(a)
    _read(store, b)  # never
    store.residency.wait_for([d])  # only if nothing else is left
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
        store.residency.wait_for([message])
    assert store.evict_one([{now}, {later}], True)
    assert now.is_resident and not later.is_resident
    assert not store.evict_one([{now}, {later}], True)


def test_a_freed_message_stays_until_its_last_reader_ends(store: MessageStore) -> None:
    message = _message(store, "m", 4)
    _encode(store, message)
    _read(store, message)
    store.free(message.message)
    assert message.is_resident
    with pytest.raises(UnknownMessageError):
        store.get("s", "m")
    store.residency.leave([message], reading=True)
    store.settle(message)
    assert not message.blocks and _pool(store).freed == [0]


def test_a_freed_message_stays_while_a_patch_of_it_is_to_be_laid_over_it(
    store: MessageStore,
) -> None:
    """Again and again, if the patch makes room for others while a call waits for it."""
    source = _message(store, "m", 4)
    store.identify(source)
    _encode(store, source)
    patch = Encoding(
        source.message, source.trace, None, source.token_ids, plan=source.plan,
        patch=Patch(source, 0, ((0, 2),)),
    )  # fmt: skip
    store.residency.wait_for([patch])
    store.free(source.message)
    patch.is_orphan = True
    for _ in range(2):
        assert source.is_resident
        (block,) = _pool(store).new(1)
        store.residency.patch(patch, [[block]], 0, store.step)
        _pool(store).free_blocks([block])
        store.settle(patch)
        assert patch.blocks and not source.blocks, "it has a place of its own now"
        store.evict(patch)
        _encode(store, source)
        store.settle(source)
    assert source.is_resident
    store.residency.leave([patch], reading=False)
    store.settle(patch)
    assert not source.blocks and not patch.blocks and not source.num_wanting
    store.residency.check()


def test_of_failed_messages_the_latest_are_known(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_choreo.store.store.MAX_FAILED", 2)
    for name in "abc":
        store.fail(store.create("s", name), "it was aborted")
    assert store.get("s", "c").failure == store.get("s", "b").failure == "it was aborted"
    assert store.find("s", "a") is None and len(store.messages()) == 2
    again = store.create("s", "b")  # the name of a failed call may be given again
    store.fail(store.create("s", "d"), "it was aborted")
    assert store.get("s", "b") is again


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
    read: list[tuple[Encoding, list[Block]]] = []
    for action, number in steps:
        message = messages[number]
        if action in ("encode", "part") and not (message.message.freed or message.num_readers):
            _encode(store, message, 1 if action == "part" else None)
        elif action == "evict" and not message.num_readers:
            store.evict(message)
        elif action == "read" and message.is_resident:
            pool.touch(message.held_blocks)
            _read(store, message)
            read.append((message, message.held_blocks))
        elif action == "leave" and read:
            left, blocks = read.pop(number % len(read))
            pool.free_blocks(blocks)
            store.residency.leave([left], reading=True)
            store.settle(left)
        elif action == "free" and not message.message.freed:
            store.free(message.message)
        elif action == "settle":
            store.settle(message)
        elif action == "make_room":
            store.evict_one([], False)
        held = [b for m in messages for b in m.held_blocks] + [b for _, bs in read for b in bs]
        assert all(block.ref_cnt == held.count(block) for block in pool.blocks)
        assert set(store.residency.holding()) == {m for m in messages if m.blocks}
        store.residency.check()
    for left, blocks in read:
        pool.free_blocks(blocks)
        store.residency.leave([left], reading=True)
    for message in messages:
        store.free(message.message)
        store.settle(message)
    assert all(block.ref_cnt == 0 for block in pool.blocks)
    assert stats(store, SIZES)["num_messages"] == 0


@pytest.mark.parametrize("leaves_first", ["earliest", "latest"])
def test_what_one_session_frees_another_still_shares(leaves_first: str) -> None:
    pool = Pool()
    store = MessageStore(pool, SIZE, engine=b"", clock=lambda: 0.0)
    made = []
    for session in "ab":
        encoding = _message(store, f"{session}/m", 2 * SIZE + 1, session)
        store.identify(encoding)
        store.share(encoding)
        own = [*encoding.held_blocks, *pool.new(3 - encoding.num_blocks)]
        store.hold(encoding, [own], 2 * SIZE + 1)
        made.append(encoding)
    assert made[0].held_blocks[:2] == made[1].held_blocks[:2]
    gone, kept = made if leaves_first == "earliest" else reversed(made)
    store.free(gone.message)
    late = _message(store, "c/m", 2 * SIZE + 1, "c")
    store.identify(late)
    store.share(late)
    assert late.held_blocks == kept.held_blocks[:2] and late.num_encoded == 2 * SIZE

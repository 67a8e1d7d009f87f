# SPDX-License-Identifier: Apache-2.0
"""States of requests and of messages: who holds which, and what is copied before a step."""

from __future__ import annotations

import pytest

from tests.store.test_store import SIZE, Block, Pool
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.states import States
from vllm_choreo.store.store import MessageStore


class StatePool(Pool):
    """A pool with the methods by which states are taken."""

    num_gpu_blocks = 5  # one of them is nobody's

    def get_num_free_blocks(self) -> int:
        held = sum(block.ref_cnt > 0 for block in self.blocks)
        return self.num_gpu_blocks - 1 - held

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        assert num_blocks <= self.get_num_free_blocks()
        free = [block for block in self.blocks if not block.ref_cnt][:num_blocks]
        self.touch(free)
        return free + self.new(num_blocks - len(free))


@pytest.fixture
def store() -> MessageStore:
    made = MessageStore(Pool(), SIZE, states=States(StatePool(), num_in_host=2))
    made.begin_step()
    return made


def _message(store: MessageStore, name: str) -> Encoding:
    encoding = store.create("a", name).own
    encoding.token_ids, encoding.plan = [1, 2], CallPlan((), 0, 0, True)
    store.identify(encoding)
    store.hold(encoding, [store.residency.pool.new(1)], 2)  # type: ignore[attr-defined]
    return encoding


def _made(store: MessageStore, name: str) -> Encoding:
    """A message whose request has ended in an earlier step."""
    assert store.states is not None
    encoding = _message(store, name)
    store.states.start(f"makes {name}", None)
    store.hold_state(encoding, f"makes {name}")
    store.states.release(f"makes {name}")
    _next_step(store)
    return encoding


def _next_step(store: MessageStore) -> list[tuple[int, int]]:
    """Plan and run the step; returns the states that it copied."""
    assert store.states is not None
    store.take_block_copies()
    moves = store.states.copies.take().moves
    store.begin_step()
    return [(source, target) for source, target, *_ in moves]


def test_branches_begin_with_copies_of_one_state(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a = _made(store, "a")
    assert a.state is not None
    states.start("x", a)
    states.start("y", a)
    x, y = states.find("x"), states.find("y")
    assert x is not None and y is not None and len({a.state, x, y}) == 3
    assert _next_step(store) == [(a.state.block_id, x.block_id), (a.state.block_id, y.block_id)]
    states.release("x")
    states.release("y")
    assert (a.state.ref_cnt, states.num_free) == (1, 3)
    states.check()


def test_a_state_is_read_in_a_later_step_than_it_was_written(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a = _message(store, "a")
    states.start("makes a", None)
    store.hold_state(a, "makes a")
    assert not store.can_begin_behind(a)
    _next_step(store)
    assert store.can_begin_behind(a)
    store.evict(a, into_host=False)
    assert not store.can_begin_behind(a) and store.can_begin_behind(None)


def test_a_preempted_request_withdraws_its_copy(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a = _made(store, "a")
    states.start("x", a)
    states.release("x")
    assert _next_step(store) == []
    assert states.num_free == states.num_states - 1


def test_states_make_room_before_blocks_do(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a, b, c = (_made(store, name) for name in "abc")
    states.start("x", a)  # the latest used
    _next_step(store)
    states.release("x")
    assert states.victim((), 0.0) is b
    assert states.victim({b}, 0.0) is c
    b.message.pinned_until = 1.0
    assert states.victim((), 0.5) is c
    assert states.victim({a, c}, 0.5) is b
    assert store.evict_state({a})
    assert b.state is None and c.state is not None  # the pin has ended
    assert all(encoding.is_resident for encoding in (a, b, c))


def test_room_is_made_when_all_who_share_a_state_give_it_up(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a, b = _made(store, "a"), _message(store, "b")
    assert a.state is not None
    states.share(b, a.state, a.state_step)
    num_free = states.num_free
    assert store.evict_state(()) and states.num_free == num_free
    assert store.evict_state(()) and states.num_free == num_free + 1
    assert not store.evict_state(())


def test_a_state_comes_back_for_calls_of_the_very_step(store: MessageStore) -> None:
    states = store.states
    assert states is not None and states.tier is not None
    a = _made(store, "a")
    assert a.state is not None
    store.take_block_copies()
    old = a.state.block_id
    store.evict_state(())
    planned = states.copies.take()
    assert [source for source, _ in planned.saves] == [old]
    store.begin_step()
    assert a in states.tier and not store.can_begin_behind(a)
    store.restore_state(a)
    assert store.can_begin_behind(a)
    planned = states.copies.take()
    assert a.state is not None
    assert [target for _, target in planned.loads] == [a.state.block_id]
    a.message.freed = True
    store.settle(a)
    assert a not in states.tier and states.num_free == states.num_states

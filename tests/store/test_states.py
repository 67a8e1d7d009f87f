# SPDX-License-Identifier: Apache-2.0
"""States of requests and of messages: who holds which, and what is copied before a step."""

from __future__ import annotations

import pytest

from tests.store.test_store import SIZE, SIZES, Block, Pool
from vllm_choreo.memory_changes import StateStart
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.state_starts import StateOrigin
from vllm_choreo.store.states import States
from vllm_choreo.store.stats import stats, totals
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


def _next_step(store: MessageStore) -> list[StateStart]:
    """Plan and run the step; returns the states that began in it."""
    assert store.states is not None
    store.take_block_copies()
    store.states.copies.take()
    starts = store.states.starts.take()
    store.begin_step()
    return list(starts)


def test_branches_begin_with_copies_of_one_state(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a = _made(store, "a")
    assert a.state is not None
    states.start("x", StateOrigin(a))
    states.start("y", StateOrigin(a))
    x, y = states.find("x"), states.find("y")
    assert x is not None and y is not None and len({a.state, x, y}) == 3
    assert _next_step(store) == [(s.block_id, a.state.block_id, ()) for s in (x, y)]
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
    assert not store.can_begin_with([a])
    _next_step(store)
    assert store.can_begin_with([a])
    store.evict(a, into_host=False)
    assert not store.can_begin_with([a]) and store.can_begin_with([])


def test_statistics_have_the_bytes_of_states_and_of_copies_in_host_memory(
    store: MessageStore,
) -> None:
    states = store.states
    assert states is not None
    a, b = _made(store, "a"), _made(store, "b")
    assert a.state is not None
    states.share(b, a.state, 0)
    assert [m["state_bytes"] for m in stats(store, SIZES)["messages"]] == [SIZES.state] * 2
    assert stats(store, SIZES)["num_message_states"] == totals(store)["num_message_states"] == 1
    store.tier = HostTier(4, store.residency.block_copies)
    _next_step(store)
    store.evict(a)
    described = stats(store, SIZES)
    found = [(m["state_bytes"], m["host_bytes"]) for m in described["messages"]]
    assert found == [(0, SIZES.block + SIZES.state), (SIZES.state, 0)]
    assert [m["bytes_by_group"] for m in described["messages"]] == [[], [SIZES.block]]


def test_a_preempted_request_withdraws_its_copy(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a = _made(store, "a")
    states.start("x", StateOrigin(a))
    states.release("x")
    assert _next_step(store) == []
    assert states.num_free == states.num_states - 1


def test_states_make_room_before_blocks_do(store: MessageStore) -> None:
    states = store.states
    assert states is not None
    a, b, c = (_made(store, name) for name in "abc")
    states.start("x", StateOrigin(a))  # the latest used
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
    states.starts.take()
    old = a.state.block_id
    store.evict_state(())
    planned = states.copies.take()
    assert [source for source, _ in planned.saves] == [old]
    store.begin_step()
    assert a in states.tier and not store.can_begin_with([a])
    store.restore_state(a)
    assert store.can_begin_with([a])
    planned = states.copies.take()
    assert a.state is not None
    assert [target for _, target in planned.loads] == [a.state.block_id]
    a.message.freed = True
    store.settle(a)
    assert a not in states.tier and states.num_free == states.num_states


# -- any order -----------------------------------------------------------------------------------


def test_a_call_begins_behind_as_many_parents_as_stood_before_the_last_of_them(
    store: MessageStore,
) -> None:
    a, b, c, d = (_message(store, name) for name in "abcd")
    b.parents, d.parents = (a,), (c, a)
    for parents, behind, composed in (
        ((), None, ()),
        ((a,), a, ()),
        ((a, b), b, ()),
        ((a, b, c), b, (c,)),
        ((b,), None, (b,)),  # without what it was encoded behind
        ((b, a), None, (b, a)),
        ((a, a), a, (a,)),
        ((c, a), c, (a,)),
        ((c, a, d), d, ()),  # no chain, and composed when `d` was encoded
        ((c, a, d, b), d, (b,)),
        ((a, c, d), a, (c, d)),
    ):
        assert StateOrigin.of(parents) == (behind, composed)


@pytest.fixture
def composed() -> MessageStore:
    made = MessageStore(Pool(), SIZE, states=States(StatePool(), is_composed=True))
    made.begin_step()
    return made


def test_who_composes_holds_all_that_it_takes_until_the_step_is_planned(
    composed: MessageStore,
) -> None:
    states = composed.states
    assert states is not None
    a, b = _made(composed, "a"), _made(composed, "b")
    assert a.state is not None and b.state is not None
    of_a, of_b = a.state, b.state
    states.start("x", StateOrigin(a, (b, a)))
    target = states.find("x")
    assert target is not None
    assert composed.evict_state(()) is False  # all of them are taken
    states.drop(b)
    assert (of_a.ref_cnt, of_b.ref_cnt) == (3, 1)
    started = StateStart(target.block_id, of_a.block_id, ((of_b.block_id, 2), (of_a.block_id, 2)))
    assert _next_step(composed) == [started]
    assert (of_a.ref_cnt, of_b.ref_cnt) == (1, 0)
    states.check()


def test_a_start_that_is_withdrawn_lets_go_of_all_that_it_takes(composed: MessageStore) -> None:
    states = composed.states
    assert states is not None
    a, b = _made(composed, "a"), _made(composed, "b")
    states.start("x", StateOrigin(None, (b, a)))
    states.release("x")
    assert _next_step(composed) == [] and states.num_free == states.num_states - 2


def test_nothing_has_been_done_to_the_state_of_a_call_that_begins_a_text(
    composed: MessageStore,
) -> None:
    states = composed.states
    assert states is not None
    states.start("call", StateOrigin(None))
    states.start("no call", None)
    state = states.find("call")
    assert state is not None and _next_step(composed) == [(state.block_id, None, ())]


def test_one_that_runs_alone_takes_states_of_others_and_last_its_own(
    composed: MessageStore,
) -> None:
    states = composed.states
    assert states is not None
    a, b, c = (_made(composed, name) for name in "abc")
    states.start("runs", None)
    assert not states.num_free
    assert not composed.free_a_state([{a, b, c}, {b}, ()], is_alone=False)
    assert composed.free_a_state([{a, b, c}, {b, c}, {c}], is_alone=True)
    assert a.state is None
    states.start("more", None)
    assert composed.free_a_state([{b, c}, {b, c}, {c}], is_alone=True) and b.state is None


def test_idle_states_are_those_that_nobody_keeps_begins_with_or_runs_in(
    composed: MessageStore,
) -> None:
    states = composed.states
    assert states is not None
    a, b, c = (_made(composed, name) for name in "abc")
    assert states.num_idle(()) == 3 and states.num_idle([a]) == 2
    states.start("runs", StateOrigin(None, (b,)))  # copied before the step, and so in use until it
    assert states.num_idle([a]) == 1
    _next_step(composed)
    assert states.num_idle([a]) == 2
    assert b.state is not None
    states.share(c, b.state, 0)  # free if both give it up
    assert states.num_idle([]) == 2 and states.num_idle([c]) == 1

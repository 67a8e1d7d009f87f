# SPDX-License-Identifier: Apache-2.0
"""Who is evicted, and what makes two recipes the same: pure choices, as tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_store import Pool
from vllm_choreo.semantics.positions import CallPlan, ParentPlan
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.block_copies import BlockCopies, PlannedCopies
from vllm_choreo.store.digest import encoding_digest
from vllm_choreo.store.encoding import Adapter, Encoding, StoredMessage
from vllm_choreo.store.eviction import choose_victim, over_share
from vllm_choreo.store.host_tier import HostTier

NOW = 100.0


def _message(name: str, tenant: str = "", num_blocks: int = 1, **state: Any) -> Encoding:
    message = StoredMessage(name, "s", tenant)
    encoding = message.own = Encoding(message, Trace(name))
    blocks = [SimpleNamespace(block_id=f"{name}{i}", is_null=False) for i in range(num_blocks)]
    encoding.blocks, encoding.num_blocks = (blocks,), num_blocks
    encoding.num_encoded = 4 * num_blocks
    for key, value in state.items():
        setattr(message if key == "pinned_until" else encoding, key, value)
    return encoding


def test_the_order_of_eviction() -> None:
    read = _message("read", num_readers=1)
    pinned = _message("pinned", pinned_until=NOW + 1)
    waited_for = _message("waited for", num_waiting=1)
    expired = _message("expired", pinned_until=NOW)
    idle = _message("idle")
    holding, order = [read, pinned, waited_for, expired, idle], []
    while victim := choose_victim(holding, [], True, NOW):
        order.append(victim.message.id)
        holding.remove(victim)
    assert order == ["expired", "idle", "pinned", "waited for"]
    assert choose_victim([read, waited_for], [], False, NOW) is None
    assert choose_victim([idle, pinned], [{idle, pinned}], True, NOW) is None


def test_tenants_keep_to_their_share_by_their_own_oldest_messages() -> None:
    holding = [
        _message("a1", "a", 2),
        _message("b1", "b", 3),
        _message("a2", "a", 2, num_readers=1),
        _message("a3", "a", 1, pinned_until=NOW + 1),
        _message("a4", "a", 1),
    ]
    assert [e.message.id for e in over_share(holding, 4, NOW)] == ["a1"]
    assert [e.message.id for e in over_share(holding, 3, NOW)] == ["a1", "a4"]
    assert [e.message.id for e in over_share(holding, 2, NOW)] == ["a1", "b1", "a4"]


BASE: dict[str, Any] = {
    "engine": b"model",
    "tenant": "t",
    "adapter": None,
    "token_ids": [1, 2],
    "plan": CallPlan((ParentPlan("p", 0, 4, 0),), 4, 8, True),
    "parents": [b"p" * 32],
}
ADAPTER = Adapter(b"weights", None)
PLAN = BASE["plan"]


@pytest.mark.parametrize(
    "other",
    [
        {"engine": b"other model"},
        {"tenant": "u"},
        {"adapter": ADAPTER},
        {"token_ids": [1]},
        {"token_ids": [1, 258]},
        {"plan": replace(PLAN, new_offset=5)},
        {"plan": replace(PLAN, parents=(ParentPlan("p", 0, 4, 1),))},
        {"plan": replace(PLAN, parents=(ParentPlan("p", 0, 3, 0),))},
        {"parents": [b"q" * 32]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_each_part_of_a_recipe_counts(other: dict[str, Any]) -> None:
    assert encoding_digest(**BASE) == encoding_digest(**BASE)
    assert encoding_digest(**{**BASE, **other}) != encoding_digest(**BASE)


def test_names_do_not_count() -> None:
    renamed = replace(PLAN, parents=(ParentPlan("another name", 0, 4, 0),))
    assert encoding_digest(**{**BASE, "plan": renamed}) == encoding_digest(**BASE)


def _tier(num_blocks: int) -> tuple[HostTier, BlockCopies]:
    """Host memory while a step is planned, and what is copied before that."""
    copies = BlockCopies(Pool())
    copies.begin()
    return HostTier(num_blocks, copies), copies


def _planned(tier: HostTier, copies: BlockCopies) -> PlannedCopies:
    """What the step does that was planned; the next one is planned from now on."""
    tier.on_planned()
    planned = copies.take()
    copies.begin()
    return planned


def _blocks(name: str, count: int) -> list[Any]:
    numbers = range(count)
    return [SimpleNamespace(block_id=f"{name}{i}", ref_cnt=1, is_null=False) for i in numbers]


def test_host_memory_keeps_the_most_recently_used() -> None:
    tier, copies = _tier(4)
    a, b, c = _message("a", num_blocks=2), _message("b", num_blocks=2), _message("c")
    tier.save(a)
    tier.save(b)
    first = _planned(tier, copies)
    assert [block for block, _ in first.saves] == ["a0", "a1", "b0", "b1"] and not first.loads
    tier.save(a)  # lies there already
    assert _planned(tier, copies) == PlannedCopies((), (), ())
    tier.save(c)
    assert b not in tier and a in tier and c in tier and tier.num_used == 3
    copy = tier.find(a)
    assert (copy.stored_position, copy.num_encoded) == (0, 8)
    tier.load(a, [(0, 0), (0, 1)], _blocks("new", 2))
    planned = _planned(tier, copies)
    assert [block for block, _ in planned.saves] == ["c0"]
    assert planned.loads == ((first.saves[0][1], "new0"), (first.saves[1][1], "new1"))
    tier.save(_message("large", num_blocks=5))
    assert a in tier and c in tier


def test_what_is_loaded_in_a_step_is_not_overwritten_by_its_saves() -> None:
    tier, copies = _tier(4)
    a, b = _message("a", num_blocks=2), _message("b", num_blocks=2)
    tier.save(a)
    tier.save(b)
    _planned(tier, copies)
    tier.protect(a)  # before room is made for it
    tier.save(_message("c", num_blocks=2))
    tier.save(_message("d", num_blocks=2))
    tier.save(_message("too large", num_blocks=3))
    assert a in tier and b not in tier
    tier.load(a, [(0, 0), (0, 1)], _blocks("new", 2))
    planned = _planned(tier, copies)
    assert not {to for _, to in planned.saves} & {source for source, _ in planned.loads}
    tier.save(_message("e", num_blocks=3))  # in the next step it may go
    assert a not in tier


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["save", "discard"])), max_size=40))
def test_host_blocks_are_never_lost_or_shared(steps: list[tuple[int, str]]) -> None:
    tier, copies = _tier(7)
    messages = [_message(str(i), num_blocks=i) for i in range(6)]
    for index, operation in steps:
        getattr(tier, operation)(messages[index])
        used = [b for m in messages if m in tier for b in tier._saved[m].host_blocks]
        assert sorted([*used, *tier._free]) == list(range(7))
    # What was given up again is not copied, and nothing is copied over something else.
    assert {to for _, to in copies.take().saves} == set(used if steps else [])


def test_what_is_queued_between_steps_holds_what_it_reads() -> None:
    """A message that is loaded is written at once, before the copies of the next step."""
    copies = BlockCopies(Pool())
    a, b = _blocks("a", 2), _blocks("b", 1)
    copies.save(a, [0, 1])
    copies.save(b, [2])
    assert [block.ref_cnt for block in (*a, *b)] == [2, 2, 2]
    copies.free_host_blocks([1, 2, 3])  # given up before they were copied
    assert [block.ref_cnt for block in (*a, *b)] == [2, 1, 1]
    copies.begin()  # whoever gets a block from now on writes after the copies
    assert [block.ref_cnt for block in (*a, *b)] == [1, 1, 1]
    assert copies.take().saves == (("a0", 0),)


def test_what_lost_its_place_is_not_copied_there() -> None:
    pool = Pool()
    copies = BlockCopies(pool)
    (source,), (kept, lost, loaded) = pool.new(1), pool.new(3)
    copies.begin()
    copies.move(source, kept, 0)
    copies.move(source, lost, 5)
    copies.load([8], [loaded])
    assert source.ref_cnt == 3
    pool.free_blocks([lost, loaded])
    copies.on_freed([kept, lost, loaded])
    planned = copies.take()
    assert planned.moves == ((source.block_id, kept.block_id, 0, 0),) and not planned.loads
    assert source.ref_cnt == 1


def test_what_was_loaded_for_a_copy_alone_is_not_loaded_once_that_lost_its_place() -> None:
    """A block is free then, and somebody else's copy may go there in the same step."""
    pool = Pool()
    copies = BlockCopies(pool)
    loaded, between, last = pool.new(3)
    copies.begin()
    copies.load([8], [loaded])
    copies.move(loaded, between, 0)
    copies.move(between, last, 0)
    pool.free_blocks([loaded, between])
    copies.on_freed([loaded, between])
    assert (loaded.ref_cnt, between.ref_cnt) == (1, 1), "held by what is made of them"
    pool.free_blocks([last])
    copies.on_freed([last])
    assert not any(block.ref_cnt for block in (loaded, between, last))
    planned = copies.take()
    assert not planned.loads and not planned.moves

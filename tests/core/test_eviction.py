# SPDX-License-Identifier: Apache-2.0
"""Who is evicted, and what makes two recipes the same: pure choices, as tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.semantics.positions import CallPlan, ParentPlan
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.digest import encoding_digest
from vllm_choreo.store.encoding import Adapter, Encoding, StoredMessage
from vllm_choreo.store.eviction import choose_victim, over_share
from vllm_choreo.store.host_tier import HostTier

NOW = 100.0


def _message(name: str, tenant: str = "", num_blocks: int = 1, **state: Any) -> Encoding:
    message = StoredMessage(name, "s", tenant)
    encoding = message.own = Encoding(message, Trace(name))
    encoding.blocks = [SimpleNamespace(block_id=f"{name}{i}") for i in range(num_blocks)]
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


def test_host_memory_keeps_the_most_recently_used() -> None:
    tier = HostTier(4)
    a, b, c = _message("a", num_blocks=2), _message("b", num_blocks=2), _message("c")
    tier.save(a)
    tier.save(b)
    saves, loads = tier.take_copies()
    assert [block for block, _ in saves] == ["a0", "a1", "b0", "b1"] and loads == []
    tier.save(a)  # lies there already
    assert tier.take_copies() == ([], [])
    tier.save(c)
    assert b not in tier and a in tier and c in tier and tier.num_used == 3
    targets = [SimpleNamespace(block_id=f"new{i}") for i in range(2)]
    assert tier.load(a, targets) == (0, 8)
    (save,), loads = tier.take_copies()
    assert save[0] == "c0" and loads == [(saves[0][1], "new0"), (saves[1][1], "new1")]
    tier.save(_message("large", num_blocks=5))
    assert a in tier and c in tier


def test_what_is_loaded_in_a_step_is_not_overwritten_by_its_saves() -> None:
    tier = HostTier(4)
    a, b = _message("a", num_blocks=2), _message("b", num_blocks=2)
    tier.save(a)
    tier.save(b)
    tier.take_copies()
    tier.keep(a)  # before room is made for it
    tier.save(_message("c", num_blocks=2))
    tier.save(_message("d", num_blocks=2))
    tier.save(_message("too large", num_blocks=3))
    assert a in tier and b not in tier
    tier.load(a, [SimpleNamespace(block_id=f"new{i}") for i in range(2)])
    saves, loads = tier.take_copies()
    assert not {to for _, to in saves} & {source for source, _ in loads}
    tier.save(_message("e", num_blocks=3))  # in the next step it may go
    assert a not in tier


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["save", "discard"])), max_size=40))
def test_host_blocks_are_never_lost_or_shared(steps: list[tuple[int, str]]) -> None:
    tier = HostTier(7)
    messages = [_message(str(i), num_blocks=i) for i in range(6)]
    for index, operation in steps:
        getattr(tier, operation)(messages[index])
        used = [b for m in messages if m in tier for b in tier._saved[m].host_blocks]
        assert sorted([*used, *tier._free]) == list(range(7))

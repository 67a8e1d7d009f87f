# SPDX-License-Identifier: Apache-2.0
"""Calls step by step, with vLLM's requests and block pool but without an engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.errors import CyclicParentsError, ParentFailedError, TooLongError
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.store.store import MessageStore

SIZE = 4


@pytest.fixture
def table() -> CallTable:
    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=SIZE)
    return CallTable(MessageStore(pool, SIZE), max_model_len=48)


def _open(
    table: CallTable, name: str, num_tokens: int, priority: int = 0, **params: Any
) -> ScheduledCall:
    tokens = list(range(100, 100 + num_tokens))
    request = Request(
        request_id=f"r-{name}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=5),
        pooling_params=None,
        priority=priority,
    )
    params = {"kind": "prefill", **params}
    return table.open(request, ChoreoParams(save_as=name, session="s", **params))


def _run(table: CallTable, call: ScheduledCall) -> list[int]:
    """Resolve, schedule and end a prefill as the scheduler does; returns its block table."""
    assert table.resolve(call) and table.is_ready(call)
    pool = table.store.residency.pool
    (adopted,) = table.blocks.of_parents(call)
    pool.touch(adopted)
    own = pool.get_new_blocks(-(-call.encoding.num_tokens // SIZE))  # type: ignore[attr-defined]
    blocks = [*adopted, *own]
    table.on_scheduled(call, [blocks], call.plan.base + call.encoding.num_tokens)  # type: ignore[union-attr]
    pool.free_blocks(reversed(blocks))
    table.close(call, None)
    return [block.block_id for block in blocks]


def test_block_tables_begin_with_the_parents_own_blocks(table: CallTable) -> None:
    free = table.store.residency.pool.get_num_free_blocks()  # type: ignore[attr-defined]
    assert _run(table, _open(table, "a", 6)) == [1, 2]
    assert _run(table, _open(table, "b", 4)) == [3]
    call = _open(table, "c", 5, parents=["b", "a", ("a", 5, 6)])
    assert _run(table, call) == [3, 1, 2, 2, 4, 5]
    assert call.plan is not None and (call.plan.base, call.plan.new_offset) == (16, 11)
    assert call.request.prompt_token_ids == [
        *(100, 101, 102, 103),
        *(100, 101, 102, 103, 104, 105, 105, 105),
        *(105, 105, 105, 105),
        *(100, 101, 102, 103, 104),
    ]
    references = {
        b.block_id: b.ref_cnt for m in table.store.residency.holding() for b in m.held_blocks
    }
    assert references == dict.fromkeys(range(1, 6), 1)
    for message in table.store.messages("s"):
        table.store.free(message)
    assert table.store.residency.pool.get_num_free_blocks() == free  # type: ignore[attr-defined]


def test_a_call_waits_until_its_parent_is_known_and_resident(table: CallTable) -> None:
    parent = _open(table, "p", 4, kind="decode")
    child = _open(table, "c", 2, parents=["p"])
    assert not table.resolve(child) and child.plan is None
    assert parent.encoding.num_waiting == 1
    assert table.resolve(parent)
    parent.encoding.token_ids = [1, 2, 3, 4, 5]
    table.store.mark_final(parent.encoding)
    assert table.resolve(child) and not table.is_ready(child)


def test_a_prefill_that_waits_for_its_own_parent_keeps_its_children_waiting(
    table: CallTable,
) -> None:
    """Its tokens are known at once, but not where they stand."""
    _open(table, "p", 4, kind="decode")
    middle = _open(table, "m", 2, parents=["p"])
    child = _open(table, "c", 2, parents=["m"])
    assert not table.resolve(middle)
    assert not table.resolve(child)


def test_a_failed_parent_ends_its_children(table: CallTable) -> None:
    parent = _open(table, "p", 4, kind="decode")
    child = _open(table, "c", 2, parents=["p"])
    table.close(parent, "it was aborted")
    with pytest.raises(ParentFailedError, match="aborted"):
        table.resolve(child)
    table.close(child, "its parent failed")
    assert parent.encoding.num_waiting == 0


def test_what_a_call_waits_for_gets_its_priority() -> None:
    """And its place before it; what has a better one keeps that."""
    given: list[tuple[list[str], int]] = []

    def reprioritize(requests: Collection[Request], priority: int) -> None:
        given.append(([request.request_id for request in requests], priority))

    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=SIZE)
    table = CallTable(MessageStore(pool, SIZE), max_model_len=48, reprioritize=reprioritize)
    deepest = _open(table, "deepest", 4, priority=7)
    between = _open(table, "between", 4, priority=3)
    urgent = _open(table, "urgent", 4, priority=1)
    parent = _open(table, "parent", 4, priority=5, parents=["deepest", "urgent"])
    assert given == [(["r-deepest"], 5)] and urgent.turn == (1, 3)
    child = _open(table, "child", 4, priority=2, parents=["parent"])
    assert given[1:] == [(["r-parent", "r-deepest"], 2)]
    in_turn = sorted(table.calls.values(), key=lambda call: call.turn)
    assert in_turn == [urgent, deepest, parent, child, between]
    _open(table, "late", 4, priority=9, parents=["child"])
    assert len(given) == 2


def test_what_can_never_run_is_refused(table: CallTable) -> None:
    with pytest.raises(CyclicParentsError):
        _open(table, "x", 1, parents=["x"])
    _run(table, _open(table, "a", 1))
    with pytest.raises(TooLongError):
        table.resolve(_open(table, "y", 1, parents=["a"] * 12))


def test_an_evicted_parent_is_missing_until_somebody_encodes_it(table: CallTable) -> None:
    first = _open(table, "a", 6)
    _run(table, first)
    table.store.evict(first.encoding)
    child = _open(table, "c", 2, parents=["a"])
    assert table.resolve(child) and not table.is_ready(child)
    assert table.missing(child) == [first.encoding]
    table.store.residency.add_encoder(first.encoding, "somebody")
    assert table.missing(child) == []


def test_a_decode_that_ends_while_preempted_still_makes_its_message(table: CallTable) -> None:
    """Its blocks are gone, so a reader must have it encoded again, and must not wait for ever."""
    free = table.store.residency.pool.get_num_free_blocks()  # type: ignore[attr-defined]
    call = _open(table, "a", 3, kind="decode")
    assert table.resolve(call)
    blocks = table.store.residency.pool.get_new_blocks(1)  # type: ignore[attr-defined]
    table.on_scheduled(call, blocks, 3)
    child = _open(table, "b", 2, parents=["a"])
    assert not table.resolve(child)
    table.on_preempted(call)
    table.store.residency.pool.free_blocks(blocks)
    call.request.num_computed_tokens = 0
    call.request.append_output_token_ids([7, 8])  # sampled by the step that was under way
    table.finish_decode(call, [])
    table.close(call, None)
    assert call.encoding.token_ids == [100, 101, 102, 7, 8]
    assert table.resolve(child) and not table.is_ready(child)
    assert table.missing(child) == [call.encoding]
    assert table.store.residency.pool.get_num_free_blocks() == free  # type: ignore[attr-defined]

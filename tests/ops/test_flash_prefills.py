# SPDX-License-Identifier: Apache-2.0
"""Long prefills by FlashAttention: which they are, their rounds, and what comes of them.

FlashAttention itself is compiled for GPUs alone; here it is written in plain PyTorch.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import sampled
from tests.ops.cases import GPU, TOLERANCE, Case, make_case, run
from tests.ops.flash import flash_attention
from vllm_choreo.ops import Layout, flash_prefills, span_attention
from vllm_choreo.ops.flash_prefills import first_prefill, plan_prefills
from vllm_choreo.ops.triton import make_tiles

# `(query, computed own tokens, parents)` of each request.
_BATCHES = {
    "one": [(16, 0, [60, 33])],
    "in chunks": [(12, 70, [60])],
    "without parents": [(13, 20, [])],
    "behind decodes": [(1, 60, [60, 60]), (3, 9, []), (14, 0, [24, 50]), (12, 5, [80])],
    "before a decode": [(14, 0, [40]), (1, 60, [40])],
    "many parents": [(22, 3, [20] * 9)],
}
_KINDS = {
    "plain": {},
    "soft cap, neighbours rotate": {"softcap": 2.0, "is_neox": False},
    "part of a head rotates": {"rotary_dim": 24, "head_size": 48},
    "nothing rotates, one KV head": {"rotary_dim": 0, "num_kv_heads": 1},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def _short_ones_are_long(monkeypatch):
    monkeypatch.setattr(flash_prefills, "MIN_QUERIES", 12)
    monkeypatch.setattr(flash_prefills, "MIN_SPAN_TOKENS", 16)
    monkeypatch.setattr(flash_prefills, "_MIN_PART", 4)


def aligned(case: Case) -> Case:
    """The same case with parents that begin with a block, in a cache that is side by side."""
    size = case.batch.block_size
    first_slot = case.batch.first_slot // size * size
    batch = dataclasses.replace(case.batch, first_slot=first_slot)
    return dataclasses.replace(case, batch=batch, layout=Layout.SIDE_BY_SIDE)


def planned(case: Case, max_rows: int, attention=flash_attention):
    table = case.batch.block_table.to(GPU)
    own = case.batch.num_tokens[case.batch.span_start_loc[1:].long() - 1].to(GPU)
    batch = dataclasses.replace(case.batch, block_table=table)
    first = first_prefill(batch, max_rows)
    if first == batch.num_reqs:
        return None
    return plan_prefills(batch, first, attention, own, max_rows)


def by_flash_attention(case: Case, max_rows: int, attention=flash_attention) -> torch.Tensor:
    plan = dataclasses.replace(case.plan(device=GPU), prefills=planned(case, max_rows, attention))
    output = torch.full(case.query.shape, 7.0, dtype=case.query.dtype, device=GPU)
    layer, query, cache = case.layer(GPU), case.query.to(GPU), case.kv_cache.to(GPU)
    span_attention(query, cache, output, plan, layer, "triton")
    return output.cpu()


def tiles_of(case: Case, plan):
    _, num_heads, head_size = case.query.shape
    return make_tiles(
        plan.prefills.rest_of(case.batch), None, num_heads=num_heads, head_size=head_size,
        num_kv_heads=case.kv_cache.shape[1], dtype=case.query.dtype, device=GPU,
    )  # fmt: skip


def small_case(requests, seed=3, **kind) -> Case:
    sizes = {"block_size": 16, "num_kv_heads": 2, "group_heads": 2, "head_size": 32}
    return aligned(make_case(seed, requests, **{**sizes, **kind}))


@pytest.mark.parametrize("max_rows", sampled([10_000, 40], 1))
@pytest.mark.parametrize("kind", sampled(list(_KINDS), 1))
@pytest.mark.parametrize("batch", _BATCHES)
def test_they_are_what_they_are_by_definition(batch, kind, max_rows):
    case = small_case(_BATCHES[batch], **_KINDS[kind])
    found, expected = by_flash_attention(case, max_rows), run(case, "reference")
    torch.testing.assert_close(found, expected, **TOLERANCE[case.query.dtype])


def test_all_that_ends_the_batch_and_is_long_is_taken():
    counts = {}
    for name, requests in _BATCHES.items():
        batch = small_case(requests).batch
        counts[name] = batch.num_reqs - first_prefill(batch, 10_000)
    expected = {"behind decodes": 2, "before a decode": 0}
    assert counts == {name: expected.get(name, 1) for name in _BATCHES}


@pytest.mark.parametrize(
    "requests", [[(11, 0, [90])], [(16, 0, [15, 15])], [(16, 0, [60] * 10)]],
    ids=["few queries", "short parents", "no room for a row for each parent"],
)  # fmt: skip
def test_what_tiles_read_better_is_left_to_them(requests):
    case = small_case(requests)
    assert first_prefill(case.batch, 40) == 1 and planned(case, 40) is None


def test_parents_that_begin_inside_a_block_are_left_to_tiles():
    case = small_case([(14, 0, [60, 33]), (14, 0, [60])])
    case.batch.first_slot[1] += 3
    assert first_prefill(case.batch, 10_000) == 1
    found, expected = by_flash_attention(case, 10_000), run(case, "reference")
    torch.testing.assert_close(found, expected, **TOLERANCE[torch.float32])


def test_spans_that_count_by_other_weights_are_left_to_tiles():
    case = small_case([(14, 0, [60]), (14, 0, [60, 33])], reweighted=True)
    chosen = case.batch.reweighting.is_chosen
    chosen.zero_()
    assert first_prefill(case.batch, 10_000) == 0
    chosen[0] = 1
    assert first_prefill(case.batch, 10_000) == 1
    chosen[2] = 1
    assert first_prefill(case.batch, 10_000) == 2


def test_the_next_layers_run_as_the_first_one():
    case = small_case(_BATCHES["behind decodes"])
    plan = dataclasses.replace(case.plan(device=GPU), prefills=planned(case, 40))
    query, cache = case.query.to(GPU), case.kv_cache.to(GPU)
    plan = dataclasses.replace(plan, tiles=tiles_of(case, plan))
    outputs = [torch.full_like(query, fill) for fill in (7.0, 8.0)]
    for output in outputs:
        span_attention(query, cache, output, plan, case.layer(GPU), "triton")
    assert torch.equal(*outputs)


def test_flash_attention_meets_every_query_and_key_once():
    case = small_case(_BATCHES["behind decodes"])
    num_pairs = 0

    def counting(**given):
        nonlocal num_pairs
        lengths = given["cu_seqlens_q"].diff()
        num_pairs += int((lengths * given["seqused_k"]).sum())
        if given["causal"]:
            num_pairs -= int((lengths * (lengths - 1) // 2).sum())
        return flash_attention(**given)

    by_flash_attention(case, 40, counting)
    first = int(case.batch.query_start_loc[2])
    assert num_pairs == int(case.batch.materialize_mask()[first:].sum())


def test_a_round_has_as_many_rows_as_there_is_room_for():
    case = small_case([(70, 0, [90, 33]), (40, 9, [50])])
    for max_rows, num_rounds in ((30, 10), (60, 5), (200, 2), (1000, 1)):
        rounds = planned(case, max_rows).rounds
        assert len(rounds) == num_rounds and all(one.num_rows <= max_rows for one in rounds)
        bounds = [0, *(one.end_query for one in rounds)]
        assert [one.first_query for one in rounds] == bounds[:-1] and bounds[-1] == 110


_REQUEST = st.tuples(
    st.integers(1, 24), st.integers(0, 50), st.lists(st.integers(16, 120), max_size=4)
)


@settings(max_examples=15, deadline=None)
@given(
    requests=st.lists(_REQUEST, min_size=1, max_size=4),
    max_rows=st.integers(30, 200),
    seed=st.integers(0, 99),
)
def test_random_batches(requests, max_rows, seed):
    case = small_case(requests, seed, num_kv_heads=1, head_size=16)
    found, expected = by_flash_attention(case, max_rows), run(case, "reference")
    torch.testing.assert_close(found, expected, **TOLERANCE[torch.float32])

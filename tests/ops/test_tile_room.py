# SPDX-License-Identifier: Apache-2.0
"""Plans in a room: what kernels compute by them, one after the other at the same addresses."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import sampled
from tests.ops.cases import GPU, TOLERANCE, Case, make_case, run
from tests.ops.drawn import batch_of, parents
from tests.ops.test_tile_planner import HEADS, is_read, to_read
from vllm_choreo.ops import plan_shared_reads, span_attention
from vllm_choreo.ops.tile_planner import cut_tiles
from vllm_choreo.ops.tile_room import TileRoom
from vllm_choreo.ops.triton import fill_room, make_room

# Results that nobody stores are nothing divided by nothing, of which the interpreter warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

_MOST = 6
# Of one query each: `(query, computed own tokens, parents)`. The last one fills the room.
_STEPS = [
    [(1, 70, [50, 30])],
    [(1, 3, [200, 64, 90]), (1, 0, []), (1, 500, [200])],
    [(1, 9, [])],
    [(1, 40, [130] * 3), (1, 1, [20]), (1, 90, [7, 7]), (1, 5, [300]), (1, 2, [64]), (1, 0, [9])],
    [(1, 12, [16]), (1, 80, [])],
]
_KINDS = {
    "sinks and a soft cap": {"sinks": True, "softcap": 2.0},
    "plain": {},
    "window": {"window": 60},
    "alibi, 71 heads": {"alibi": True, "num_kv_heads": 1, "group_heads": 71, "head_size": 32},
    "latent": {"num_kv_heads": 1, "group_heads": 4, "head_size": 48, "rotary_dim": 16,
               "value_size": 32},
    "bfloat16": {"dtype": torch.bfloat16},
}  # fmt: skip


def _sizes(case: Case) -> dict:
    return {
        "num_heads": case.query.shape[1], "num_kv_heads": case.kv_cache.shape[1],
        "head_size": case.query.shape[2], "dtype": case.query.dtype, "device": GPU,
        "window": case.window,
    }  # fmt: skip


def _in_room(case: Case, kind: dict, num_spans: int = 24):
    """Room for cases like one, and a plan of it whose other tensors lie at fixed places, too."""
    room = make_room(_MOST, num_spans, True, **_sizes(case))
    spans = dataclasses.replace(
        case.batch,
        query_start_loc=torch.zeros(_MOST + 1, dtype=torch.int32),
        block_table=torch.zeros(_MOST, case.batch.block_table.shape[1], dtype=torch.int32).to(GPU),
        **{name: torch.zeros(num_spans, dtype=torch.int32)
           for name in ("first_slot", "num_tokens", "stored_position", "position_delta")},
    )  # fmt: skip
    angles = torch.zeros(num_spans, kind.get("rotary_dim", case.query.shape[2]), device=GPU)
    return room, dataclasses.replace(case.plan(), spans=spans, cos_sin=angles)


@pytest.mark.parametrize("kind", sampled(list(_KINDS), 1))
def test_one_plan_after_the_other_computes_what_fresh_ones_do(kind):
    """Rows of padding are left alone, whatever the plan before had there."""
    cases = [make_case(seed, step, **_KINDS[kind]) for seed, step in enumerate(_STEPS)]
    room, common = _in_room(cases[0], _KINDS[kind])
    for case in cases:
        num_reqs = case.batch.num_reqs
        for num_requests in {num_reqs, _MOST}:
            fill_room(room, num_requests, case.batch, plan_shared_reads(case.batch),
                      **_sizes(case))  # fmt: skip
            common.spans.block_table[:num_reqs] = case.batch.block_table.to(GPU)
            found = case.plan(device=GPU).cos_sin
            common.cos_sin[: len(found)] = found
            plan = dataclasses.replace(common, tiles=room.tiles(num_requests))
            padded = torch.zeros(num_requests, *case.query.shape[1:], dtype=case.query.dtype)
            padded[:num_reqs] = case.query
            size = num_requests, case.query.shape[1], case.value_size or case.query.shape[2]
            output = torch.full(size, 7.0, dtype=case.query.dtype, device=GPU)
            span_attention(
                padded.to(GPU), case.kv_cache.to(GPU), output, plan, case.layer(GPU), "triton"
            )
            expected = run(case, "reference")
            tolerance = TOLERANCE[case.query.dtype]
            torch.testing.assert_close(output[:num_reqs].cpu(), expected, **tolerance)
            assert (output[num_reqs:] == 7.0).all()


def test_own_spans_grow_in_a_room():
    case = make_case(7, _STEPS[1])
    room, common = _in_room(case, {})
    fill_room(room, 4, case.batch, None, **_sizes(case))
    common.spans.block_table[:3] = case.batch.block_table.to(GPU)
    common.cos_sin[: case.batch.num_spans] = case.plan(device=GPU).cos_sin
    own = case.batch.span_start_loc[1:].long() - 1
    for more in (1, 40):
        num_tokens = case.batch.num_tokens.clone()
        num_tokens[own] += more
        case.batch = dataclasses.replace(case.batch, num_tokens=num_tokens)
        room.own_tokens[:3] = num_tokens[own].to(GPU)
        plan = dataclasses.replace(common, tiles=room.tiles(4))
        output = torch.zeros_like(case.query, device=GPU)
        span_attention(
            case.query.to(GPU), case.kv_cache.to(GPU), output, plan, case.layer(GPU), "triton"
        )
        expected = run(case, "reference")
        torch.testing.assert_close(output.cpu(), expected, **TOLERANCE[torch.float32])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(parents, max_size=4), st.just(1)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from([0, 1, 3, 100]),
    st.sampled_from([0, 4, 400]),
    st.sampled_from([None, 7]),
)
def test_what_has_few_enough_spans_always_fits(asked, padding, num_shares, num_partials, window):
    """And is read as it is to be, whatever was there before; what is beyond it reads nothing."""
    batch = batch_of(asked)
    num_requests = len(asked) + padding
    shares = {16: num_shares, 64: num_shares}
    room = TileRoom(num_requests, batch.num_spans, shares, 4, num_partials, "cpu")
    for reads in (plan_shared_reads(batch, min_tokens=1), None):
        plan = cut_tiles(batch, reads, lambda plan: room.fits(plan, num_requests), **HEADS,
                         max_rows=64, num_programs=lambda rows: 40, window=window)  # fmt: skip
        assert room.fits(plan, num_requests)
        room.put(plan)
        tiles = room.tiles(num_requests)
        assert tiles is room.tiles(num_requests)
        assert all(len(one.items) == num_requests + num_shares for one in tiles.classes)
        seen, own = is_read(batch, tiles)
        assert seen.keys() == own.keys() == set(range(len(asked)))
        for query, found in seen.items():
            assert not to_read(batch, query, window) - found
            assert found <= to_read(batch, query, None)
        fresh = plan.to("cpu")
        count = len(fresh.merged_query)
        assert tiles.merged_query.tolist() == [
            *fresh.merged_query.tolist(), *[-1] * (num_requests - count)
        ]  # fmt: skip
        starts = tiles.partial_start_loc
        assert torch.equal(starts[: count + 1], fresh.partial_start_loc)
        assert (starts[count:] == starts[count]).all(), "what is beyond has no partial results"


def test_too_much_for_a_room_is_refused():
    case = make_case(1, _STEPS[3])
    room = make_room(_MOST, 4, True, **_sizes(case))
    with pytest.raises(ValueError, match=r"6 requests with \d+ spans do not fit into a room for 6"):
        fill_room(room, _MOST, case.batch, None, **_sizes(case))
    with pytest.raises(ValueError, match="do not fit into a room for 2"):
        fill_room(room, 2, case.batch, None, **_sizes(case))
    assert room.own_tokens.dtype == torch.int32

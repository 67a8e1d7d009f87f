# SPDX-License-Identifier: Apache-2.0
"""What only the GPU's kernels have: float16, caches with any strides, tiles that are kept.

They run on a GPU if there is one, else in Triton's interpreter.
"""

import dataclasses

import pytest
import torch

from tests.grids import sampled
from tests.ops.cases import GPU, TOLERANCE, Case, ints, make_case, make_rotation, run
from tests.ops.test_sharing import WORKLOADS as SHARED
from tests.ops.test_sharing import shared_case, shared_reads
from tests.ops.test_span_attention import WORKLOADS
from vllm_choreo.ops import Layout, SpanBatch, reposition_keys, span_attention, triton
from vllm_choreo.ops.sharing import PARTIAL_BYTES
from vllm_choreo.ops.tile_planner import plan_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def laid_out(cache: torch.Tensor, order: str) -> torch.Tensor:
    """The same cache with other strides: slots before heads, or cut out of one with all layers."""
    if order == "heads first":
        return cache
    if order == "slots first":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    layers = torch.zeros(cache.shape[0], 3, *cache.shape[1:], dtype=cache.dtype)
    layers[:, 1] = cache
    return layers[:, 1]


@pytest.mark.parametrize("dtype", sampled(DTYPES, 1), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("order", ["heads first", "slots first", "layers inside"])
def test_side_by_side_caches(order, dtype):
    case = make_case(1, WORKLOADS["mixed"], dtype=dtype, block_size=16, head_size=80)
    case.layout = Layout.SIDE_BY_SIDE
    expected = run(case, "reference")
    case.kv_cache = laid_out(case.kv_cache, order)
    torch.testing.assert_close(run(case, "triton"), expected, **TOLERANCE[dtype])


def test_the_layout_matters():
    case = make_case(1, WORKLOADS["mixed"])
    first = run(case, "reference")
    case.layout = Layout.SIDE_BY_SIDE
    assert not torch.allclose(first, run(case, "reference"), atol=0.1)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("order", ["heads first", "slots first", "layers inside"])
def test_reposition_side_by_side_caches(order, dtype, is_neox):
    torch.manual_seed(2)
    whole = torch.randn(6, 2, 16, 2 * 48).to(dtype)
    cos_sin = make_rotation(32, is_neox).cos_sin(ints([900, -3, 11]))
    src, dst = ints([1, 1, 4]), ints([0, 5, 4])
    expected = whole.clone()
    reposition_keys(expected, src, dst, cos_sin, is_neox, "reference", Layout.SIDE_BY_SIDE)
    cache = laid_out(whole, order).to(GPU)
    on_gpu = (tensor.to(GPU) for tensor in (src, dst, cos_sin))
    reposition_keys(cache, *on_gpu, is_neox, "triton", Layout.SIDE_BY_SIDE)
    torch.testing.assert_close(cache.cpu(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_long_contexts_are_split(num_kv_heads):
    """Also where the queries of a tile see nothing of a share of the own tokens."""
    case = make_case(3, [(1, 700, [700, 30, 600]), (30, 700, [])], num_kv_heads=num_kv_heads)
    tiles = tiles_of(case)
    assert any(len(c.items) > len(c.query) for c in tiles.classes) and tiles.num_partials
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, "triton"), expected, **TOLERANCE[torch.float32])


def test_more_heads_than_a_tile_has_rows():
    case = make_case(4, [(3, 5, [40])], num_kv_heads=1, group_heads=71, head_size=32)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, "triton"), expected, **TOLERANCE[torch.float32])


def tiles_of(case: Case, reads=None):
    return triton.make_tiles(
        case.batch, reads, num_heads=case.query.shape[1], num_kv_heads=case.kv_cache.shape[1],
        head_size=case.query.shape[2], dtype=case.query.dtype, device=GPU,
    )  # fmt: skip


def with_tiles(case: Case, tiles) -> torch.Tensor:
    """The output by tiles that were made before; the batch tells nothing but the block table."""
    names = [f.name for f in dataclasses.fields(case.batch)]
    kept = ("block_table", "block_size", "reweighting")
    nothing = {name: ints([0, 0]) for name in names if name not in kept}
    plan = case.plan(tiles=tiles, device=GPU)
    plan = dataclasses.replace(plan, spans=dataclasses.replace(plan.spans, **nothing))
    output = torch.zeros_like(case.query, device=GPU)
    triton.span_attention(case.query.to(GPU), case.kv_cache.to(GPU), output, plan, case.layer(GPU))
    return output.cpu()


@pytest.mark.parametrize("workload", sampled(SHARED, 1))
def test_tiles_serve_while_own_spans_grow(workload):
    """The plan of a step serves the next ones: only the counts of own tokens change."""
    case = shared_case(5, workload)
    reads = shared_reads(case.batch)
    tiles = tiles_of(case, reads)
    batch = case.batch
    own = batch.span_start_loc[1:].long() - 1
    for more in (1, 40):
        num_tokens = batch.num_tokens.clone()
        num_tokens[own] += more
        case.batch = dataclasses.replace(batch, num_tokens=num_tokens)
        grown = tiles.with_own_tokens(num_tokens[own].to(GPU))
        expected = run(case, "reference")
        found = with_tiles(case, grown)
        torch.testing.assert_close(found, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("num_programs", [1, 4, 64])
def test_every_token_of_a_tile_is_in_one_item(num_programs):
    case = shared_case(6, "a prefill among decodes")
    batch = case.batch
    reads = shared_reads(batch)
    tiles = plan_tiles(batch, reads, num_heads=6, num_kv_heads=2, max_rows=64,
                       num_programs=lambda rows: num_programs, device="cpu")  # fmt: skip
    segments = tiles.segments.tolist()
    items = [item for tile_class in tiles.classes for item in tile_class.items.tolist()]
    listed = sorted(s for item in items for s in range(*item[1:3]))
    assert listed == list(range(len(segments)))
    seen = dict.fromkeys(range(int(batch.query_start_loc[-1])), 0)
    for tile_class in tiles.classes:
        for tile, first, end, own, share, *_ in tile_class.items.tolist():
            num_tokens = sum(segments[s][3] for s in range(first, end))
            for query, request in zip(tile_class.query[tile].tolist(),
                                      tile_class.request[tile].tolist(), strict=True):  # fmt: skip
                if query >= 0:
                    seen[query] += num_tokens
                    assert own in (-1, request)
                    if own >= 0 and share == 0:
                        seen[query] += int(tiles.own_tokens[request]) - (
                            int(tiles.query_end[request]) - 1 - query
                        )
    assert list(seen.values()) == batch.materialize_mask().sum(1).tolist()


@pytest.mark.parametrize(
    ("num_tiles", "num_shares"), [(1, 12), (3, 10), (20, 3), (33, 1), (40, 4), (66, 1), (500, 1)]
)
def test_a_launch_is_split_so_that_it_ends_soonest(num_tiles, num_shares):
    """Where 33 items run at once; no item is shorter than 256 tokens."""
    num_tokens = 256 * 12
    blocks = [range(192 * r, 192 * (r + 1)) for r in range(num_tiles)]
    counts = [num_tokens] * num_tiles
    batch = SpanBatch(
        torch.arange(num_tiles + 1, dtype=torch.int32),
        torch.tensor([list(of_tile) for of_tile in blocks], dtype=torch.int32),
        torch.arange(num_tiles + 1, dtype=torch.int32),
        *(torch.tensor(x, dtype=torch.int32) for x in ([0] * num_tiles, counts)),
        *(torch.zeros(num_tiles, dtype=torch.int32) for _ in range(2)),
        16,
    )
    tiles = plan_tiles(batch, None, num_heads=32, num_kv_heads=8, max_rows=64,
                       num_programs=lambda rows: 33 * 8, device="cpu")  # fmt: skip
    (tile_class,) = tiles.classes
    assert len(tile_class.items) == num_tiles * num_shares


def test_partial_results_go_where_they_are_told():
    case = make_case(3, [(1, 700, [700, 30, 600]), (2, 700, [])], num_kv_heads=2)
    expected = run(case, "triton")
    room = torch.full((PARTIAL_BYTES // 4,), float("nan"), device=GPU)
    output = torch.empty_like(case.query, device=GPU)
    arguments = case.query.to(GPU), case.kv_cache.to(GPU), output
    plan, layer = dataclasses.replace(case.plan(device=GPU), workspace=room), case.layer(GPU)
    span_attention(*arguments, plan, layer, "triton")
    torch.testing.assert_close(output.cpu(), expected, atol=0, rtol=0)
    assert not room[0].isnan()
    small = dataclasses.replace(plan, workspace=room[:8])
    with pytest.raises(ValueError, match="workspace has 8 numbers"):
        span_attention(*arguments, small, layer, "triton")


def test_other_dtypes_are_refused():
    case = make_case(1, [(4, 0, [5])])
    with pytest.raises(ValueError, match="float32, bfloat16 and float16"):
        span_attention(
            case.query.double(), case.kv_cache.double(), torch.zeros_like(case.query).double(),
            case.plan(), case.layer(), "triton",
        )  # fmt: skip

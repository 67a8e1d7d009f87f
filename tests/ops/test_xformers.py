# SPDX-License-Identifier: Apache-2.0
"""xformers as a second oracle: its masks against ours, its kernel against the reference.

The kernel runs on a GPU if there is one, else in Triton's interpreter.
"""

import dataclasses
import random

import pytest
import torch

from tests.grids import sampled
from tests.ops.cases import TOLERANCE, Case, ints, make_case, run
from tests.ops.test_span_attention import WORKLOADS
from tests.ops.test_triton import laid_out
from vllm_choreo.ops import Layout, plan_shared_reads, reposition_keys

pytest.importorskip("xformers", reason="xformers is installed on Linux x86_64 only")

from vllm_choreo.ops.xformers import plan_launches

pytestmark = [
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
    # The interpreter's, of splits without keys: their weight is 0.
    pytest.mark.filterwarnings("ignore:(invalid|divide by zero):RuntimeWarning"),
]

SHAPES = {
    "plain": {},
    "interleaved": {"is_neox": False},
    "partial rotary": {"rotary_dim": 16},
    "no rotary": {"rotary_dim": 0},
    "window": {"window": 60},
    "narrow window and sinks": {"window": 3, "sinks": True},
    "sinks": {"sinks": True},
    "one head each": {"group_heads": 1},
    "many heads each": {"num_kv_heads": 1, "group_heads": 14},
    "head size 32": {"head_size": 32},
    "block of 128": {"block_size": 128},
    "block of 48": {"block_size": 48},
    "block of 16": {"block_size": 16},
}


def gpu_case(seed: int, workload: str, **options) -> Case:
    case = make_case(seed, WORKLOADS[workload], **{"dtype": torch.float16, **options})
    case.layout = Layout.SIDE_BY_SIDE
    return case


def slots_of(batch, r: int, j: int) -> torch.Tensor:
    """Where the tokens of span `j` of request `r` lie."""
    virtual = int(batch.first_slot[j]) + torch.arange(int(batch.num_tokens[j]))
    blocks = batch.block_table[r].long()[virtual // batch.block_size]
    return blocks * batch.block_size + virtual % batch.block_size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workload", WORKLOADS)
def test_masks_are_those_of_xformers(workload, seed):
    rng = random.Random(seed)
    batch = make_case(seed, WORKLOADS[workload]).batch
    # A block twice in a row would be drawn once by xformers.
    rows = [rng.sample(range(40), batch.block_table.shape[1]) for _ in range(batch.num_reqs)]
    batch = dataclasses.replace(batch, block_table=torch.tensor(rows, dtype=torch.int32))
    expected = batch.materialize_mask()
    found = torch.zeros_like(expected)
    ends = batch.num_tokens.cumsum(0).tolist()
    row = batch.block_table.shape[1] * batch.block_size
    for launch in plan_launches(batch):
        num_queries = sum(reader.num_queries for reader in launch.readers)
        bias = launch.bias(batch).materialize((num_queries, len(launch.readers) * row))
        for reader in launch.readers:
            seen, bias = (bias == 0)[: reader.num_queries], bias[reader.num_queries :]
            slots = slots_of(batch, reader.request, reader.span)
            assert seen.sum() == seen[:, slots].sum(), "nothing beyond the span is visible"
            queries = slice(reader.first_query, reader.first_query + reader.num_queries)
            tokens = slice(ends[reader.span] - slots.numel(), ends[reader.span])
            found[queries, tokens] |= seen[:, slots]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", sampled(SHAPES, 3))
def test_kernel_equals_reference_with_any_shape(shape):
    case = gpu_case(len(shape), "choreographed decode", **SHAPES[shape])
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, "xformers"), expected, **TOLERANCE[torch.float16])


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", WORKLOADS)
def test_kernel_equals_reference_in_any_batch(workload):
    case = gpu_case(len(workload), workload)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, "xformers"), expected, **TOLERANCE[torch.float16])


@pytest.mark.gpu
@pytest.mark.parametrize("workload", WORKLOADS)
def test_bfloat16(workload):
    case = gpu_case(3, workload, dtype=torch.bfloat16)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, "xformers"), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("order", sampled(["layers inside", "slots first", "heads first"], 1))
def test_caches_are_read_where_they_lie(order):
    case = gpu_case(1, "choreographed decode", block_size=16)
    expected = run(case, "reference")
    case.kv_cache = laid_out(case.kv_cache, order)
    torch.testing.assert_close(run(case, "xformers"), expected, **TOLERANCE[torch.float16])


def test_every_query_attends_to_every_parent():
    """The last key of each parent in turn is made to dominate, and is what every query finds."""
    for parent in range(3):
        case = gpu_case(2, "choreographed decode", rotary_dim=0, group_heads=1)
        slot = int(slots_of(case.batch, 0, parent)[-1])
        key, value = case.kv_cache[slot // 32, :, slot % 32].chunk(2, dim=-1)
        key[:] = 8 * case.query[0]
        value[:] = 100.0
        found = run(case, "xformers")
        torch.testing.assert_close(found, torch.full_like(found, 100.0))


def test_reads_change_nothing():
    case = make_case(5, [(1, 3, [80])] * 2, dtype=torch.float16)
    case.layout = Layout.SIDE_BY_SIDE
    batch = case.batch
    first_slot = batch.first_slot.clone().index_fill_(0, torch.tensor([0, 2]), 7)
    table = batch.block_table[:1].repeat(2, 1)
    case.batch = dataclasses.replace(batch, block_table=table, first_slot=first_slot)
    reads = plan_shared_reads(case.batch)
    assert reads is not None
    expected = run(case, "xformers")
    torch.testing.assert_close(run(case, "xformers", reads), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": torch.float32}, "query is torch.float32"),
        ({"softcap": 5.0}, "softcap is 5.0"),
        ({"alibi": True}, "alibi_slopes are given"),
        ({"head_size": 80}, "head size 80"),
        ({"block_size": 8}, "block size 8"),
        ({"reweighted": True}, "some spans count by other weights"),
    ],
)
def test_what_the_kernel_lacks_is_refused(options, named):
    with pytest.raises(ValueError, match=rf"{named}.* use impl='triton'"):
        run(gpu_case(1, "mixed", **options), "xformers")


def test_other_layouts_are_refused():
    case = gpu_case(1, "mixed")
    case.layout = Layout.KEYS_TRANSPOSED
    with pytest.raises(ValueError, match=r"keys transposed.* use impl='triton'"):
        run(case, "xformers")
    case.layout = Layout.SIDE_BY_SIDE
    wide = torch.zeros(40, 2, 33, 128, dtype=torch.float16)[:, :, :32]
    case.kv_cache = wide
    with pytest.raises(ValueError, match=r"kv_cache has strides.* use impl='triton'"):
        run(case, "xformers")


def test_repositioning_is_refused():
    cache, blocks = torch.zeros(2, 1, 16, 64), ints([0])
    with pytest.raises(ValueError, match="use impl='triton'"):
        reposition_keys(cache, blocks, blocks, torch.zeros(1, 32), impl="xformers")

# SPDX-License-Identifier: Apache-2.0
"""Memory of partial results: bounded for every batch, and nobody can tell from the results."""

import dataclasses
import random

import pytest
import torch

from tests.ops.cases import TOLERANCE, Case, ints, make_cache, make_rotation, run
from vllm_choreo.ops import Layout, SpanBatch, SpanPlan, cpu, plan_shared_reads
from vllm_choreo.ops.sharing import MAX_SHARED_QUERIES, PARTIAL_BYTES, partial_row_bytes
from vllm_choreo.ops.tile_planner import plan_tiles

SIZE = 16
SHAPES = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128), "71/1x64": (71, 1, 64)}
# A GPU with many multiprocessors: more programs, more partial results.
GPU = {"max_rows": 64, "num_programs": lambda rows: 296, "device": "cpu"}


def batch_of(q_lens: list[int], parents: list[list[int]], tokens: int) -> SpanBatch:
    """Requests that read messages of so many tokens, by number, in an order of their own."""
    per_message = -(-tokens // SIZE)
    width = max(map(len, parents)) * per_message
    own_blocks = -(-max(q_lens) // SIZE)
    rows, spans, starts = [], [], [0]
    num_messages = 1 + max(m for numbers in parents for m in numbers)
    for r, (q_len, numbers) in enumerate(zip(q_lens, parents, strict=True)):
        blocks = [m * per_message + k for m in numbers for k in range(per_message)]
        own = num_messages * per_message + r * own_blocks
        rows.append(blocks + [0] * (width - len(blocks)) + [own + k for k in range(own_blocks)])
        spans += [(i * per_message * SIZE, tokens, 0, 3 * i + r) for i in range(len(numbers))]
        spans.append((width * SIZE, max(q_len, 1), width * SIZE, 0))
        starts.append(len(spans))
    first, num_tokens, stored, delta = (ints(list(c)) for c in zip(*spans, strict=True))
    loc = ints([0, *torch.tensor(q_lens).cumsum(0).tolist()])
    table = torch.tensor(rows, dtype=torch.int32)
    return SpanBatch(loc, table, ints(starts), first, num_tokens, stored, delta, SIZE)


def random_batch(rng: random.Random) -> SpanBatch:
    """Few or many readers of messages in ever other combinations: groups without end."""
    num_reqs, num_messages = rng.choice([(3, 5), (60, 12), (250, 40)])
    q_lens = [rng.choice([0, 1, 1, 1, 5, 16, 64, 700]) for _ in range(num_reqs)]
    q_lens[0] = max(q_lens[0], 1)
    parents = [rng.sample(range(num_messages), rng.randint(1, 5)) for _ in range(num_reqs)]
    return batch_of(q_lens, parents, rng.choice([20, 130, 600]))


def many_readers(num_reqs: int, q_len: int) -> SpanBatch:
    return batch_of([q_len] * num_reqs, [[i % 7, 7 + i % 11] for i in range(num_reqs)], 400)


BATCHES = {
    "four prefills": lambda: batch_of([2048] * 4, [list(range(16))] * 4, 500),
    "a thousand readers": lambda: many_readers(1000, 1),
    "decodes with drafts": lambda: many_readers(250, 5),
    **{f"random {seed}": lambda seed=seed: random_batch(random.Random(seed)) for seed in range(6)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_partial_results_stay_below_the_cap(name, shape):
    heads, kv_heads, head_size = SHAPES[shape]
    row_bytes = partial_row_bytes(heads, head_size)
    batch = BATCHES[name]()
    batch.validate()
    for reads in (plan_shared_reads(batch), plan_shared_reads(batch, PARTIAL_BYTES // row_bytes)):
        tiles = plan_tiles(batch, reads, num_heads=heads, num_kv_heads=kv_heads,
                           max_partials=PARTIAL_BYTES // row_bytes, **GPU)  # fmt: skip
        assert tiles.num_partials * row_bytes <= PARTIAL_BYTES
    if cpu.unavailable_reason() is None and heads <= 32:
        found = cpu.partial_bytes(SpanPlan(batch, None, reads), heads, kv_heads, head_size)
        # Long tiles are split for the threads: at most 4 splits of 384 rows for each.
        splits = 4 * torch.get_num_threads() * 384 * (head_size + 2) * 4
        assert found <= PARTIAL_BYTES + splits


def test_prefills_read_for_themselves():
    """Their tiles are full of their own queries: reading together would save nothing."""
    assert plan_shared_reads(BATCHES["four prefills"]()) is None
    few = batch_of([MAX_SHARED_QUERIES] * 2, [[0, 1]] * 2, 100)
    (shared,) = plan_shared_reads(few).groups()[2:]
    assert shared.members == (0, 1)
    mixed = batch_of([1, MAX_SHARED_QUERIES + 1, 1], [[0, 1]] * 3, 100)
    (shared,) = plan_shared_reads(mixed).groups()[3:]
    assert shared.members == (0, 2)


def test_a_cap_drops_the_groups_that_pay_least():
    batch = batch_of([1] * 6, [[0, 1], [0, 1], [0, 1], [0, 2], [3, 4], [3, 5]], 100)

    def groups(max_partials):
        reads = plan_shared_reads(batch, max_partials)
        return reads and [group.members for group in reads.groups()[batch.num_reqs :]]

    assert sorted(groups(None)) == [(0, 1, 2), (0, 1, 2, 3), (4, 5)]
    assert groups(8) == [(0, 1, 2, 3)]
    assert groups(7) == [(0, 1, 2)]
    assert groups(3) is None


def test_what_reading_together_saves_may_be_too_little():
    batch = batch_of([1] * 5, [[0, 1], [0, 1], [0], [2, 3], [2]], 100)
    saved = 2 * 100 + 100 + 100  # of 0, 1 and 2, which three, two and two requests read
    assert plan_shared_reads(batch, min_saved=saved) is not None
    assert plan_shared_reads(batch, min_saved=saved + 1) is None


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("max_partials", [0, 11, 40])
def test_a_capped_plan_gives_the_same_results(impl, max_partials):
    if impl == "cpu" and cpu.unavailable_reason() is not None:
        pytest.skip("the C++ kernels are not built")
    torch.manual_seed(1)
    q_lens = [1, 3, 1, 40, 1]
    batch = batch_of(q_lens, [[0, 1], [1, 0], [1, 2], [0, 2], [2, 1]], 90)
    num_blocks = int(batch.block_table.max()) + 1
    case = Case(
        torch.randn(sum(q_lens), 4, 32), make_cache(num_blocks, 2, SIZE, 32, torch.float32),
        batch, make_rotation(32, True), 0.2, 0.0, None, Layout.KEYS_TRANSPOSED,
    )  # fmt: skip
    expected = run(case, "reference")
    reads = plan_shared_reads(batch, max_partials)
    assert (reads is None) == (max_partials == 0)
    torch.testing.assert_close(run(case, impl, reads), expected, **TOLERANCE[torch.float32])
    if impl == "triton":
        tiles = plan_tiles(batch, reads, num_heads=4, num_kv_heads=2, max_rows=64,
                           num_programs=lambda rows: 16, max_partials=max_partials,
                           device="cpu")  # fmt: skip
        assert tiles.num_partials <= max_partials
        from vllm_choreo.ops import span_attention

        plan = dataclasses.replace(case.plan(reads), tiles=tiles)
        output = torch.empty_like(case.query)
        span_attention(case.query, case.kv_cache, output, plan, case.layer(), "triton")
        torch.testing.assert_close(output, expected, **TOLERANCE[torch.float32])

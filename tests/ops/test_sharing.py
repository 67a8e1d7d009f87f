# SPDX-License-Identifier: Apache-2.0
"""Reading together gives what reading alone gives, whatever the spans have in common."""

import dataclasses
import functools
import itertools
import random

import pytest
import torch

from tests.ops.cases import TOLERANCE, Case, dense_attention, ints, make_case, run
from vllm_choreo.ops import SpanBatch, plan_shared_reads
from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.sharing import MIN_SHARED_TOKENS

# (q_len, own tokens computed before, lengths of the parents): few lengths, so that spans coincide.
WORKLOADS = {
    "voters": [(1, 3, [96, 40, 64])] * 5,
    "voters begin": [(7, 0, [96, 40, 64])] * 3,
    "a prefill among decodes": [
        (1, 3, [96, 40]), (90, 0, [96, 40]), (0, 5, [96]), (1, 30, []), (2, 8, [96, 96, 40])
    ],
    "the same message twice": [(2, 1, [40, 40, 64]), (1, 8, [40, 40])],
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "interleaved": {"is_neox": False},
    "partial rotary": {"rotary_dim": 16},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True, "rotary_dim": 0},
    "window": {"window": 50, "sinks": True},
    "narrow window": {"window": 7},
    "one head each": {"group_heads": 1},
    "many heads each": {"num_kv_heads": 1, "group_heads": 14},
    "block of 16": {"block_size": 16},
    "reweighted": {"reweighted": True},
    "latent": {
        "head_size": 80, "value_size": 48, "rotary_dim": 32, "num_kv_heads": 1, "group_heads": 5
    },
}  # fmt: skip


# However little: what does not pay must be right as well, and small cases have more groups.
shared_reads = functools.partial(plan_shared_reads, min_tokens=16)


def shared_case(seed: int, workload: str, **options) -> Case:
    """Parents of all requests lie in the same blocks, at a few places, at positions of their own.

    Some spans coincide, some overlap in part, some begin in the middle of a block.
    """
    case = make_case(seed, WORKLOADS[workload], **options)
    batch, rng = case.batch, random.Random(seed)
    size = batch.block_size
    rows = torch.arange(batch.num_reqs)[:, None]
    # Blocks 0 to 9 are everybody's; the rest of each row is its own.
    table = (10 + rows + torch.arange(batch.block_table.shape[1])[None] % 6 * 5) % 40
    table[:, : 320 // size] = torch.arange(320 // size) % 40
    owns = [j - 1 for j in batch.span_start_loc.tolist()[1:]]
    first_slot = batch.first_slot.clone()
    for j in range(batch.num_spans):
        first_slot[j] = 352 if j in owns else rng.choice([0, 0, 64, 64, size, 71])
    case.batch = dataclasses.replace(
        batch, block_table=table.to(torch.int32), first_slot=first_slot
    )
    case.batch.validate(40)
    return case


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("variant", ["plain", "softcap", "alibi", "window", "reweighted", "latent"])
def test_reference_equals_dense_float64(workload, variant):
    case = shared_case(1, workload, **VARIANTS[variant])
    reads = shared_reads(case.batch)
    assert reads is not None
    expected = dense_attention(case).float()
    torch.testing.assert_close(run(case, "reference", reads), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_equals_reference(kernel, variant, dtype):
    for seed, workload in enumerate(WORKLOADS):
        case = shared_case(seed, workload, dtype=dtype, **VARIANTS[variant])
        reads = shared_reads(case.batch)
        assert reads is not None
        expected = run(case, "reference", None)
        torch.testing.assert_close(run(case, kernel, reads), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_reqs", [2, 13, 60])
@pytest.mark.parametrize("local", [{}, {"window": 300, "sinks": True}], ids=["all", "window"])
def test_many_readers_of_much(cpu_kernel, num_reqs, threads, local):
    """Splits over threads and over tiles are merged with what each request reads alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = make_case(num_reqs, [(1, 20, [700, 30])] * num_reqs, **local)
        batch = case.batch
        table = batch.block_table[:1].repeat(num_reqs, 1)
        first_slot = batch.first_slot.clone()
        first_slot[0::3], first_slot[1::3] = 5, 64
        case.batch = dataclasses.replace(batch, block_table=table, first_slot=first_slot)
        reads = shared_reads(case.batch)
        assert reads is not None
        expected = run(case, "reference", None)
        torch.testing.assert_close(
            run(case, cpu_kernel, reads), expected, **TOLERANCE[torch.float32]
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_read_once_by_every_span(seed):
    batch = shared_case(seed, list(WORKLOADS)[seed % len(WORKLOADS)]).batch
    reads = shared_reads(batch)
    assert reads is not None
    found: dict[int, list[int]] = {}
    spans_of = _spans_of_requests(batch)
    for g, group in enumerate(reads.groups()):
        assert group.members == (g,) if g < batch.num_reqs else len(group.members) > 1
        for piece in group.pieces:
            slots = {
                _slots(batch, spans_of, j, begin, piece.num_tokens) for j, begin in piece.reads
            }
            assert len(slots) == 1  # of the cache, whoever reads them
            for request, (j, begin) in zip(group.members, piece.reads, strict=True):
                assert j in spans_of[request]
                found.setdefault(j, []).extend(range(begin, begin + piece.num_tokens))
    sizes = batch.num_tokens.tolist()
    parents = [j for spans in spans_of for j in spans]
    assert {j: sorted(tokens) for j, tokens in found.items()} == {
        j: list(range(sizes[j])) for j in parents
    }


def _spans_of_requests(batch: SpanBatch) -> list[range]:
    """The parent spans of each request."""
    starts = batch.span_start_loc.tolist()
    return [range(a, b - 1) for a, b in itertools.pairwise(starts)]


def _slots(batch, spans_of, j, begin, num_tokens) -> tuple[int, ...]:
    request = next(r for r, spans in enumerate(spans_of) if j in spans)
    first = int(batch.first_slot[j]) + begin
    size = batch.block_size
    row = batch.block_table[request].tolist()
    return tuple(row[s // size] * size + s % size for s in range(first, first + num_tokens))


def _two_readers(first: tuple[int, int], second: tuple[int, int], table=None) -> SpanBatch:
    """Two requests with one parent each, `(first slot, tokens)`, and one own token."""
    if table is None:
        table = [list(range(8)), [0, 1, 2, 3, 4, 5, 6, 9]]
    return SpanBatch(
        ints([0, 1, 2]), torch.tensor(table, dtype=torch.int32), ints([0, 2, 4]),
        ints([first[0], 224, second[0], 224]), ints([first[1], 1, second[1], 1]),
        ints([0, 224, 0, 224]), ints([5, 0, 9, 0]), 32,
    )  # fmt: skip


def _shared_tokens(batch: SpanBatch, min_tokens: int = 16) -> int:
    reads = shared_reads(batch, min_tokens=min_tokens)
    if reads is None:
        return 0
    return sum(p.num_tokens for group in reads.groups()[2:] for p in group.pieces)


def test_sub_spans_share_the_blocks_that_they_cut_alike():
    assert _shared_tokens(_two_readers((0, 100), (0, 100))) == 100
    assert _shared_tokens(_two_readers((0, 100), (0, 96))) == 96
    assert _shared_tokens(_two_readers((32, 64), (0, 128))) == 64
    assert _shared_tokens(_two_readers((40, 60), (32, 90))) == 32  # of blocks 1, 2, 3 the second
    assert _shared_tokens(_two_readers((0, 64), (64, 64))) == 0


def test_little_in_common_is_read_alone():
    fewest = MIN_SHARED_TOKENS
    for tokens, shared in ((fewest - 1, 0), (fewest, fewest)):
        assert _shared_tokens(_two_readers((3, tokens), (3, tokens)), fewest) == shared


def test_equal_spans_in_other_blocks_are_not_shared():
    other = [list(range(8)), [10, 11, 12, 13, 14, 15, 16, 17]]
    assert shared_reads(_two_readers((0, 100), (0, 100), other)) is None


def test_padding_is_never_read(impl):
    """NaN in every slot that no span covers changes nothing."""
    case = make_case(3, [(1, 0, [100]), (1, 0, [100])])
    case.batch = _two_readers((0, 100), (0, 100))
    reads = shared_reads(case.batch)
    expected = run(case, impl, reads)
    for slot in set(range(40 * 32)) - set(range(100)) - {224, 288}:
        key_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
        value_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
    torch.testing.assert_close(run(case, impl, reads), expected, atol=0, rtol=0)


def test_reads_of_another_batch_are_refused(cpu_kernel):
    """A plan that does not fit must never turn into wrong numbers."""
    case = make_case(4, [(1, 0, [100]), (1, 0, [100])])
    case.batch = _two_readers((0, 100), (0, 100))
    reads = shared_reads(case.batch)
    moved = [list(range(8)), [0, 11, 2, 3, 4, 5, 6, 9]]
    case.batch = _two_readers((0, 100), (0, 100), moved)
    with pytest.raises(ValueError, match="read different slots"):
        run(case, cpu_kernel, reads)
    case.batch = _two_readers((0, 90), (0, 90))
    with pytest.raises(IndexError, match="beyond a parent span"):
        run(case, cpu_kernel, reads)
    broken = dataclasses.replace(reads, member_req=ints([0, 1, 0, 7]))
    with pytest.raises(IndexError, match="wrong member"):
        run(case, cpu_kernel, broken)

# SPDX-License-Identifier: Apache-2.0
"""The batch batcher over steps: what is kept, and what is planned again."""

import pytest
import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.ops import LayerAttention, Rotation, SpanBatch, SpanPlan, cpu, span_attention

SIZE = 16
SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
TOKEN_BYTES = 512
ROTATION = Rotation(torch.tensor([1.0], dtype=torch.float64), is_neox=True)


def reader(*parents: tuple[int, int]) -> RequestSpans:
    """A request that reads parents of `(tokens, position_delta)`, each from a block's start."""
    first_slot, slot = [], 0
    for num_tokens, _ in parents:
        first_slot.append(slot)
        slot += -(-num_tokens // SIZE) * SIZE
    return RequestSpans(
        first_slot=tuple(first_slot),
        num_tokens=tuple(n for n, _ in parents),
        stored_position=(0,) * len(parents),
        position_delta=tuple(delta for _, delta in parents),
        base=slot,
    )


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(batcher: SpanBatcher, rows: dict[str, list[int]], seq_lens: list[int]):
    """One decode step of the requests with these rows of the block table."""
    table = ints([row + [0] * (12 - len(row)) for row in rows.values()])
    batch = StepBatch(list(rows), ints(range(len(rows) + 1)), ints(seq_lens), table)
    plans = batcher.batch(batch)
    return plans and plans[0]


@pytest.fixture
def batcher() -> SpanBatcher:
    return SpanBatcher(SIZE, [LayerKind(ROTATION, SHAPE, TOKEN_BYTES)])


def test_ordinary_batches_are_left_alone(batcher):
    assert step(batcher, {"a": [1, 2], "b": [3]}, [6, 2]) is None


def test_readers_of_the_same_blocks_are_grouped(batcher):
    batcher.update({"a": reader((80, 0), (5, 3)), "b": reader((80, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [1, 2, 3, 4, 5, 9], "c": [10]}
    batch = step(batcher, rows, [98, 81, 3])
    (shared,) = batch.reads.groups()[3:]
    assert shared.members == (0, 1)
    assert [(p.num_tokens, p.reads) for p in shared.pieces] == [(80, ((0, 0), (3, 0)))]


def test_only_own_spans_grow_between_steps(batcher):
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    first = step(batcher, rows, [81, 82])
    second = step(batcher, rows, [82, 83])
    assert second.reads is first.reads and second.cos_sin is first.cos_sin
    assert first.spans.num_tokens.tolist() == [80, 1, 80, 2]
    assert second.spans.num_tokens.tolist() == [80, 2, 80, 3]


def test_equal_spans_of_another_request_are_planned_again(batcher):
    """Spans say where in its row of the block table a request reads, not in which blocks."""
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    assert step(batcher, rows, [81, 82]).reads is not None
    batcher.update({"c": reader((80, 7))}, ["b"])
    elsewhere = {"a": rows["a"], "c": [11, 12, 13, 14, 15, 16]}
    assert step(batcher, elsewhere, [82, 82]).reads is None


def test_a_request_that_starts_again_elsewhere_is_planned_again(batcher):
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    assert step(batcher, {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}, [81, 82]).reads
    batcher.update({"b": reader((80, 7))}, [])  # after a preemption, perhaps in copies
    moved = {"a": [1, 2, 3, 4, 5, 6], "b": [11, 12, 13, 14, 15, 16]}
    assert step(batcher, moved, [82, 82]).reads is None


def test_prefills_are_grouped_once_they_decode(batcher):
    """Their parts of the prompt are long; what is read together is planned again after it."""
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    table = ints([[1, 2, 3, 4, 5, *range(20, 50)], [1, 2, 3, 4, 5, *range(50, 80)]])

    def reads(counts, seq_lens):
        loc = ints([0, counts[0], sum(counts)])
        return batcher.batch(StepBatch(["a", "b"], loc, ints(seq_lens), table))[0].reads

    assert reads([100, 1], [180, 81]) is None
    assert reads([3, 1], [183, 82]) is not None
    decoding = reads([1, 1], [184, 83])
    assert decoding is not None
    assert reads([1, 1], [185, 84]) is decoding


def test_each_reads_alone_if_so_set(batcher):
    batcher.update({"a": reader((80, 0)), "b": reader((80, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    batcher.shared_reading = False
    assert step(batcher, rows, [81, 82]).reads is None
    batcher.shared_reading = True
    assert step(batcher, rows, [82, 83]).reads is not None


# -- groups of layers ------------------------------------------------------------------------------


def attend(plan: SpanPlan, rotation: Rotation | None) -> torch.Tensor:
    """What a layer with random contents finds by a plan, the same contents in every call."""
    generator = torch.Generator().manual_seed(3)
    query, cache = torch.randn(2, 4, 32, generator=generator), torch.zeros(20, 2, 16, 64)
    cache.normal_(generator=generator)
    output = torch.empty_like(query)
    layer = LayerAttention(scale=0.3, is_neox=rotation is None or rotation.is_neox)
    span_attention(query, cache, output, plan, layer)
    return output


def test_layers_of_two_groups_read_other_spans_in_one_step():
    """As after a repair of some layers: their keys lie in other blocks, one parent is left out."""
    rotation = Rotation(torch.rand(16, dtype=torch.float64), is_neox=True)
    kinds = [
        LayerKind(rotation, SHAPE, TOKEN_BYTES),
        LayerKind(None, SHAPE, TOKEN_BYTES),
        LayerKind(rotation, SHAPE, TOKEN_BYTES, group=7),
    ]
    repaired = RequestSpans((16,), (11,), (0,), (5,), base=48)
    spans = RequestSpans((0, 16), (9, 14), (0, 0), (2, 3), base=48, other_groups={7: repaired})
    batcher = SpanBatcher(16, kinds)
    batcher.update({"a": spans, "b": RequestSpans((0,), (9,), (0,), (0,), base=16)}, [])
    table, other = ints([[3, 5, 8, 9], [3, 11, 0, 0]]), ints([[0, 6, 7, 2], [4, 1, 0, 0]])
    for grown in (1, 2):
        batch = StepBatch(
            ["a", "b"],
            ints([0, 1, 2]),
            ints([48 + grown, 16 + grown]),
            table,
            other_tables={7: other},
        )
        plans = batcher.batch(batch)
        assert plans[0].spans is plans[1].spans, "layers that read alike share what is laid out"
        for plan, blocks, found, deltas in (
            (plans[0], table, [(0, 9), (16, 14)], [2, 3, 0, 0, 0]),
            (plans[2], other, [(16, 11)], [5, 0, 0, 0]),
        ):
            first = ints([*(f for f, _ in found), 48, 0, 16])
            sizes = ints([*(n for _, n in found), grown, 9, grown])
            stored = ints([0] * len(found) + [48, 0, 16])
            starts = ints([0, len(found) + 1, len(found) + 3])
            expected = SpanBatch(
                ints([0, 1, 2]), blocks, starts, first, sizes, stored, ints(deltas), 16
            )
            alone = SpanPlan(expected, rotation.cos_sin(ints(deltas)))
            torch.testing.assert_close(attend(plan, rotation), attend(alone, rotation))
        assert not torch.allclose(attend(plans[0], rotation)[0], attend(plans[2], rotation)[0])
    batcher.update({}, ["a", "b"])
    assert not batcher.reads_spans(["a", "b"])


def test_what_a_plan_was_made_of_may_change_after():
    """vLLM fills the block table anew for each step; a plan is of the step that it was made for."""
    if cpu.unavailable_reason() is not None:
        pytest.skip("the C++ kernels are not built")
    table = ints([[3, 5, 8, 9], [4, 11, 0, 0]])
    batcher = SpanBatcher(16, [LayerKind(None, SHAPE, TOKEN_BYTES)])
    batcher.update({"a": RequestSpans((0,), (20,), (0,), (0,), base=32)}, [])
    (plan,) = batcher.batch(StepBatch(["a", "b"], ints([0, 1, 2]), ints([33, 2]), table))
    before = attend(plan, None)
    table.fill_(-1)
    torch.testing.assert_close(attend(plan, None), before, atol=0, rtol=0)

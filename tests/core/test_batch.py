# SPDX-License-Identifier: Apache-2.0
"""The batch batcher over steps: what is kept, and what is planned again."""

import pytest
import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.span_batcher import LayerKind, SpanBatcher, StepBatch
from vllm_choreo.ops import Rotation

SIZE = 4
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
    return SpanBatcher(SIZE, [LayerKind(ROTATION)])


def test_ordinary_batches_are_left_alone(batcher):
    assert step(batcher, {"a": [1, 2], "b": [3]}, [6, 2]) is None


def test_readers_of_the_same_blocks_are_grouped(batcher):
    batcher.update({"a": reader((20, 0), (5, 3)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [1, 2, 3, 4, 5, 9], "c": [10]}
    batch = step(batcher, rows, [30, 21, 3])
    (shared,) = batch.reads.groups()[3:]
    assert shared.members == (0, 1)
    assert [(p.num_tokens, p.reads) for p in shared.pieces] == [(20, ((0, 0), (3, 0)))]


def test_only_own_spans_grow_between_steps(batcher):
    batcher.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    first = step(batcher, rows, [21, 22])
    second = step(batcher, rows, [22, 23])
    assert second.reads is first.reads and second.cos_sin is first.cos_sin
    assert first.spans.num_tokens.tolist() == [20, 1, 20, 2]
    assert second.spans.num_tokens.tolist() == [20, 2, 20, 3]


def test_equal_spans_of_another_request_are_planned_again(batcher):
    """Spans say where in its row of the block table a request reads, not in which blocks."""
    batcher.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    assert step(batcher, rows, [21, 22]).reads is not None
    batcher.update({"c": reader((20, 7))}, ["b"])
    elsewhere = {"a": rows["a"], "c": [11, 12, 13, 14, 15, 16]}
    assert step(batcher, elsewhere, [22, 22]).reads is None


def test_a_request_that_starts_again_elsewhere_is_planned_again(batcher):
    batcher.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    assert step(batcher, {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}, [21, 22]).reads
    batcher.update({"b": reader((20, 7))}, [])  # after a preemption, perhaps in copies
    moved = {"a": [1, 2, 3, 4, 5, 6], "b": [11, 12, 13, 14, 15, 16]}
    assert step(batcher, moved, [22, 22]).reads is None


def test_each_reads_alone_if_so_set(batcher):
    batcher.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    batcher.shared_reading = False
    assert step(batcher, rows, [21, 22]).reads is None
    batcher.shared_reading = True
    assert step(batcher, rows, [22, 23]).reads is not None

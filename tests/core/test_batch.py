# SPDX-License-Identifier: Apache-2.0
"""The batch planner over steps: what is kept, and what is planned again."""

import pytest
import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.batch import BatchPlanner
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


def step(planner: BatchPlanner, rows: dict[str, list[int]], seq_lens: list[int]):
    """One decode step of the requests with these rows of the block table."""
    table = ints([row + [0] * (12 - len(row)) for row in rows.values()])
    return planner.batch(list(rows), ints(range(len(rows) + 1)), ints(seq_lens), table)


@pytest.fixture
def planner() -> BatchPlanner:
    return BatchPlanner(SIZE, [ROTATION])


def test_ordinary_batches_are_left_alone(planner):
    assert step(planner, {"a": [1, 2], "b": [3]}, [6, 2]) is None


def test_readers_of_the_same_blocks_are_grouped(planner):
    planner.update({"a": reader((20, 0), (5, 3)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [1, 2, 3, 4, 5, 9], "c": [10]}
    batch = step(planner, rows, [30, 21, 3])
    (shared,) = batch.reads.groups()[3:]
    assert shared.members == (0, 1)
    assert [(p.num_tokens, p.reads) for p in shared.pieces] == [(20, ((0, 0), (3, 0)))]


def test_only_own_spans_grow_between_steps(planner):
    planner.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    first = step(planner, rows, [21, 22])
    second = step(planner, rows, [22, 23])
    assert second.reads is first.reads and second.cos_sin is first.cos_sin
    assert first.spans.num_tokens.tolist() == [20, 1, 20, 2]
    assert second.spans.num_tokens.tolist() == [20, 2, 20, 3]


def test_equal_spans_of_another_request_are_planned_again(planner):
    """Spans say where in its row of the block table a request reads, not in which blocks."""
    planner.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    assert step(planner, rows, [21, 22]).reads is not None
    planner.update({"c": reader((20, 7))}, ["b"])
    elsewhere = {"a": rows["a"], "c": [11, 12, 13, 14, 15, 16]}
    assert step(planner, elsewhere, [22, 22]).reads is None


def test_a_request_that_starts_again_elsewhere_is_planned_again(planner):
    planner.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    assert step(planner, {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}, [21, 22]).reads
    planner.update({"b": reader((20, 7))}, [])  # after a preemption, perhaps in copies
    moved = {"a": [1, 2, 3, 4, 5, 6], "b": [11, 12, 13, 14, 15, 16]}
    assert step(planner, moved, [22, 22]).reads is None


def test_each_reads_alone_if_so_set(planner):
    planner.update({"a": reader((20, 0)), "b": reader((20, 7))}, [])
    rows = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 9]}
    planner.shared_reading = False
    assert step(planner, rows, [21, 22]).reads is None
    planner.shared_reading = True
    assert step(planner, rows, [22, 23]).reads is not None

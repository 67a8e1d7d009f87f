# SPDX-License-Identifier: Apache-2.0
"""Spans of KV cache groups with windows: what a call sees there, and where it lies."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.engine.step import RequestSpans, request_spans
from vllm_choreo.engine.worker.reweighting import reweighting_of
from vllm_choreo.repair.weights import Weights
from vllm_choreo.semantics.positions import CallPlan, ParentPlan, num_span_blocks

SIZE = 4


@st.composite
def plans(draw: st.DrawFn) -> tuple[CallPlan, list[int]]:
    """A call on up to four parents, anywhere, and where the first token of each is stored."""
    parents, stored = [], []
    for number in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, 9))
        stop = start + draw(st.integers(1, 12))
        parents.append(ParentPlan(f"m{number}", start, stop, draw(st.integers(0, 40))))
        stored.append(draw(st.integers(0, 40)))
    base = SIZE * sum(num_span_blocks(p.start, p.stop, SIZE) for p in parents)
    new_offset = draw(st.integers(0, 40))
    return CallPlan(tuple(parents), new_offset, base, False, is_placed=draw(st.booleans())), stored


def _tokens(spans: RequestSpans) -> list[tuple[int, int, int]]:
    """Slot, stored position and turn of each token that the spans have."""
    columns = spans.first_slot, spans.num_tokens, spans.stored_position, spans.position_delta
    return [
        (slot + n, position + n, delta)
        for slot, count, position, delta in zip(*columns, strict=True)
        for n in range(count)
    ]


@given(drawn=plans(), window=st.integers(1, 30), first=st.integers(0, 20))
def test_a_group_reads_what_its_window_lets_the_first_token_see(
    drawn: tuple[CallPlan, list[int]], window: int, first: int
) -> None:
    """The first that is run: of a run of a patch, one in the middle of the message."""
    plan, stored = drawn
    spans = request_spans(plan, stored, SIZE, windows=(None, window, None), first_read=first)
    assert spans == request_spans(plan, stored, SIZE) or spans.other_groups
    assert spans.of_group(2) == spans
    near = spans.of_group(1)
    assert (near.base, near.shift, near.weights) == (spans.base, spans.shift, spans.weights)
    # In the frame of the model the first token stands at `own_position`, and sees a key where it
    # is stored, less by how much the query turns.
    expected = [
        (slot, position, delta)
        for slot, position, delta in _tokens(spans)
        if plan.own_position + first - (position - delta) < window
    ]
    assert _tokens(near) == expected
    assert 0 not in near.num_tokens
    ends = [slot + count for slot, count in zip(spans.first_slot, spans.num_tokens, strict=True)]
    columns = near.parent, near.first_slot, near.num_tokens
    for parent, slot, count in zip(*columns, strict=True):
        assert slot + count == ends[parent], "of a parent it sees the end"
    if not plan.parents and plan.new_offset == 0:
        assert spans.is_ordinary


@given(drawn=plans(), window=st.integers(1, 30))
def test_weights_are_those_of_all_parents_but_the_first(
    drawn: tuple[CallPlan, list[int]], window: int
) -> None:
    """Where a window lets a call see nothing of the first, the second has its weight still."""
    plan, stored = drawn
    plan = replace(plan, weights=Weights(0.5, 2.0))
    near = request_spans(plan, stored, SIZE, windows=(None, window)).of_group(1)
    found = reweighting_of([near], torch.device("cpu"))
    assert found is not None
    assert found.is_chosen.tolist() == [*(int(parent > 0) for parent in near.parent), 0]


@given(drawn=plans())
def test_a_window_in_which_everything_lies_is_none(drawn: tuple[CallPlan, list[int]]) -> None:
    plan, stored = drawn
    assert not request_spans(plan, stored, SIZE, windows=(None, 100)).other_groups
    assert request_spans(plan, stored, SIZE, windows=(100,)) == request_spans(plan, stored, SIZE)

# SPDX-License-Identifier: Apache-2.0
"""Laws of the plan of a call: integers alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.engine.step import request_spans
from vllm_choreo.errors import OffsetError, SpanError, TooLongError
from vllm_choreo.semantics.positions import (
    CallPlan,
    ParentPlan,
    check_length,
    num_span_blocks,
    resolve_offsets,
    resolve_span,
    virtual_tokens,
)

BLOCK_SIZES = st.sampled_from([1, 4, 32])
# (tokens of the message, start, stop, offset, stored position of its first key)
_PARENT = st.tuples(st.integers(1, 100), st.integers(0, 300), st.integers(0, 500)).flatmap(
    lambda t: st.tuples(st.just(t[0]), st.integers(0, t[0] - 1), st.just(t[1]), st.just(t[2]))
)


def _call(drawn: list[tuple[int, int, int, int]], new_offset: int, size: int) -> CallPlan:
    parents = tuple(ParentPlan(f"m{j}", start, n, a) for j, (n, start, a, _) in enumerate(drawn))
    base = size * sum(num_span_blocks(p.start, p.stop, size) for p in parents)
    return CallPlan(parents, new_offset, base, False)


@given(st.lists(st.integers(1, 50), max_size=6))
def test_omitted_offsets_put_one_parent_after_the_other(lengths: list[int]) -> None:
    offsets, new_offset = resolve_offsets(lengths, None, None)
    assert list(offsets) == [sum(lengths[:j]) for j in range(len(lengths))]
    assert new_offset == sum(lengths)
    assert resolve_offsets(lengths, offsets, None) == (offsets, new_offset)
    assert resolve_offsets(lengths, None, 7) == (offsets, 7)


@given(st.lists(st.tuples(st.integers(1, 50), st.none() | st.integers(0, 300)), max_size=6))
def test_a_parent_without_an_offset_follows_the_one_before(
    parents: list[tuple[int, int | None]],
) -> None:
    lengths, offsets = [n for n, _ in parents], [a for _, a in parents]
    placed, new_offset = resolve_offsets(lengths, offsets, None)
    ends = [0, *(a + n for n, a in zip(lengths, placed, strict=True))]
    expected = [end if a is None else a for a, end in zip(offsets, ends, strict=False)]
    assert list(placed) == expected and new_offset == ends[-1]
    assert resolve_offsets(lengths, placed, None) == (placed, new_offset)
    if not any(offsets):
        assert resolve_offsets(lengths, [None] * len(lengths), None) == resolve_offsets(
            lengths, None, None
        )


def test_the_new_message_follows_the_last_parent_not_the_rightmost() -> None:
    assert resolve_offsets([5, 3], [100, 0], None) == ((100, 0), 3)


@given(st.integers(1, 50), st.integers(-5, 60), st.integers(-5, 60))
def test_a_span_is_accepted_just_if_it_lies_inside(num_tokens: int, start: int, stop: int) -> None:
    if 0 <= start < stop <= num_tokens:
        assert resolve_span(start, stop, num_tokens, "m") == (start, stop)
    else:
        with pytest.raises(SpanError):
            resolve_span(start, stop, num_tokens, "m")


@given(st.integers(1, 200), st.data(), BLOCK_SIZES)
def test_a_span_takes_the_blocks_that_its_tokens_touch(n: int, data: Any, size: int) -> None:
    start = data.draw(st.integers(0, n - 1))
    touched = {token // size for token in range(start, n)}
    assert num_span_blocks(start, n, size) == len(touched)


@given(st.lists(_PARENT, max_size=5), st.integers(0, 400), BLOCK_SIZES)
def test_every_pair_of_tokens_has_the_distance_that_was_asked_for(
    drawn: list[tuple[int, int, int, int]], new_offset: int, size: int
) -> None:
    """The query at virtual index v, turned by delta, less the stored key, is the true distance."""
    plan = _call(drawn, new_offset, size)
    spans = request_spans(plan, [s for *_, s in drawn], size)
    assert spans.base == plan.base and plan.base % size == 0
    taken: set[int] = set()
    for j, parent in enumerate(plan.parents):
        query = plan.base + spans.position_delta[j]
        key = spans.stored_position[j]
        assert query - key == new_offset - parent.offset
        assert spans.num_tokens[j] == parent.num_tokens
        assert spans.first_slot[j] % size == parent.start % size
        slots = set(range(spans.first_slot[j], spans.first_slot[j] + parent.num_tokens))
        assert not slots & taken and max(slots) < plan.base
        taken |= slots


@given(st.lists(_PARENT, max_size=4), st.integers(0, 400), st.integers(0, 100), BLOCK_SIZES)
def test_one_constant_added_to_all_offsets_changes_no_span(
    drawn: list[tuple[int, int, int, int]], new_offset: int, shift: int, size: int
) -> None:
    moved = [(n, start, a + shift, s) for n, start, a, s in drawn]
    stored = [s for *_, s in drawn]
    one = request_spans(_call(drawn, new_offset, size), stored, size)
    assert one == request_spans(_call(moved, new_offset + shift, size), stored, size)


@given(st.lists(_PARENT, max_size=4), BLOCK_SIZES)
def test_padding_holds_no_token_that_the_parents_lack(
    drawn: list[tuple[int, int, int, int]], size: int
) -> None:
    tokens = [
        (list(range(1000 * j, 1000 * j + n)), start, n) for j, (n, start, *_) in enumerate(drawn)
    ]
    plan = _call(drawn, 0, size)
    spans = request_spans(plan, [0] * len(drawn), size)
    virtual = virtual_tokens(tokens, size)
    assert len(virtual) == plan.base
    assert set(virtual) == {t for ids, start, stop in tokens for t in ids[start:stop]}
    for j, (ids, start, stop) in enumerate(tokens):
        first = spans.first_slot[j]
        assert virtual[first : first + stop - start] == ids[start:stop]


def test_what_is_too_long_is_refused_by_the_parameter_that_is_too_large() -> None:
    parent = ParentPlan("a", 0, 10, 0)
    check_length(CallPlan((parent,), 10, 32, True), 31, 64)
    with pytest.raises(TooLongError):
        check_length(CallPlan((parent,), 10, 32, True), 32, 64)
    far = CallPlan((ParentPlan("a", 0, 10, 55),), 10, 32, True)
    with pytest.raises(OffsetError) as caught:
        check_length(far, 1, 64)
    assert caught.value.parameter == "offsets"
    with pytest.raises(OffsetError) as caught:
        check_length(CallPlan((parent,), 63, 32, True), 1, 64)
    assert caught.value.parameter == "new_offset"

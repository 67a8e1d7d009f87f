# SPDX-License-Identifier: Apache-2.0
"""What exact mode reads, and what counts as exact: decided from recipes, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.test_store import SIZE, SIZES, Pool
from vllm_choreo.errors import LimitError, OffsetError
from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.semantics.positions import (
    CallPlan,
    ParentPlan,
    check_text_offsets,
    num_span_blocks,
    resolve_offsets,
)
from vllm_choreo.store.copies import Link
from vllm_choreo.store.encoding import Adapter, Encoding, copies_of
from vllm_choreo.store.exact import exact_chain, is_exact
from vllm_choreo.store.repaired import repaired_chain
from vllm_choreo.store.session_copies import SessionCopies
from vllm_choreo.store.stats import counts, stats
from vllm_choreo.store.store import MessageStore


@pytest.fixture
def store() -> MessageStore:
    return MessageStore(Pool(), SIZE)


def _encoded(
    store: MessageStore, name: str, num_tokens: int, links: list[Link], *offsets: int
) -> Encoding:
    """A message that was encoded with `links`; omitted offsets follow one another from 0."""
    message = store.create("s", name).own
    message.token_ids = [hash((name, i)) % 1000 for i in range(num_tokens)]
    lengths = [link.num_tokens for link in links]
    *placed, new_offset = offsets or (*resolve_offsets(lengths, None, None)[0], sum(lengths))
    spans = tuple(
        ParentPlan(link.encoding.message.id, link.start, link.stop, offset)
        for link, offset in zip(links, placed, strict=True)
    )
    base = SIZE * sum(num_span_blocks(s.start, s.stop, SIZE) for s in spans)
    message.parents = tuple(link.encoding for link in links)
    message.plan = CallPlan(spans, new_offset, base, False)
    store.identify(message)
    return message


def _whole(*messages: Encoding) -> list[Link]:
    return [Link(message, 0, message.num_tokens) for message in messages]


def _chain_of_three(store: MessageStore) -> dict[str, Encoding]:
    """Three messages, each encoded with those before it: a at 0, b at 10, c at 30."""
    a = _encoded(store, "a", 10, [])
    b = _encoded(store, "b", 20, _whole(a))
    return {"a": a, "b": b, "c": _encoded(store, "c", 5, _whole(a, b))}


@pytest.mark.parametrize(
    ("spans", "new_offset", "expected"),
    [
        ([], 7, True),
        ([("a", 0, 10, 0), ("b", 0, 20, 10), ("c", 0, 5, 30)], 35, True),
        ([("a", 0, 10, 9), ("b", 0, 20, 19)], 39, True),  # all of it shifted
        ([("a", 0, 10, 0), ("b", 0, 12, 10)], 22, True),  # the last one's beginning
        ([("a", 0, 10, 0), ("b", 0, 12, 10), ("c", 0, 5, 22)], 27, False),
        ([("a", 0, 10, 0), ("b", 1, 20, 10)], 29, False),  # not its beginning
        ([("b", 0, 20, 0)], 20, False),  # without what it was encoded with
        ([("a", 0, 10, 0), ("b", 0, 20, 11)], 31, False),  # a gap
        ([("a", 0, 10, 0), ("b", 0, 20, 10)], 31, False),  # a gap before the new tokens
        ([("b", 0, 20, 10), ("a", 0, 10, 0)], 30, False),  # another order
        ([("a", 0, 10, 0), ("a", 0, 10, 10)], 20, False),  # the second read nothing
    ],
)
def test_exact(
    store: MessageStore, spans: list[tuple[str, int, int, int]], new_offset: int, expected: bool
) -> None:
    messages = _chain_of_three(store)
    links = [Link(messages[name], start, stop) for name, start, stop, _ in spans]
    assert is_exact(links, [offset for *_, offset in spans], new_offset) is expected


def test_a_parent_seen_elsewhere_than_right_before_is_not_exact(store: MessageStore) -> None:
    a = _encoded(store, "a", 10, [])
    for offsets in ((0, 11), (1, 10), (10, 0)):
        b = _encoded(store, f"b{offsets}", 5, _whole(a), *offsets)
        assert not is_exact(_whole(a, b), [0, 10], 15)


def test_a_name_given_again_is_another_message(store: MessageStore) -> None:
    messages = _chain_of_three(store)
    store.free(messages["a"].message)
    again = _encoded(store, "a", 10, [])
    assert not is_exact(_whole(again, messages["b"]), [0, 10], 30)


def test_another_adapter_is_not_exact(store: MessageStore) -> None:
    messages = _chain_of_three(store)
    assert not is_exact(_whole(messages["a"]), [0], 10, Adapter(b"another", None))


def test_a_chain_is_read_as_it_is(store: MessageStore) -> None:
    links = _whole(*_chain_of_three(store).values())
    assert exact_chain(links, None, store) == links
    assert not any(message.copies for message in store.messages())


def test_what_was_encoded_otherwise_is_read_as_copies_that_are_made_once(
    store: MessageStore,
) -> None:
    a, b = _encoded(store, "a", 3, []), _encoded(store, "b", 9, [])
    c = _encoded(store, "c", 6, _whole(a, b))  # with b as it is: not what the text says
    first, second, third = exact_chain(_whole(a, b, c), None, store)
    assert first == Link(a, 0, 3)
    assert second.encoding.message is b.message and second.encoding.parents == (a,)
    assert third.encoding.message is c.message and third.encoding.parents == (a, second.encoding)
    assert third.encoding.token_ids == c.token_ids
    assert third.encoding.plan == CallPlan(
        (ParentPlan("a", 0, 3, 0), ParentPlan("b", 0, 9, 3)), 12, 4 + 12, True
    )
    assert not third.encoding.is_resident
    assert is_exact([first, second, third], [0, 3, 12], 18)
    assert exact_chain(_whole(a, b), None, store) == [first, second]
    # What an exact call made continues the chain of copies.
    d = _encoded(store, "d", 2, [first, second])
    assert exact_chain(_whole(a, b, d), None, store)[2] == Link(d, 0, 2)
    assert sum(len(message.copies) for message in store.messages()) == 2


@pytest.mark.parametrize("run", [(0, 4), (0, 2)], ids=["whole", "patch"])
def test_a_copy_behind_another_message_of_the_same_tokens_is_another_one(
    store: MessageStore, run: TokenRange
) -> None:
    """What is read, and whether it is exact, does not depend on what other calls had copied."""
    one, twin, c = (_encoded(store, name, 4, []) for name in "abc")
    twin.token_ids = one.token_ids
    store.identify(twin)
    assert one.digest == twin.digest

    def copied(before: Encoding) -> Encoding:
        links, *_ = repaired_chain(_whole(before, c), (0, 4), [(), (run,)], None, store)
        if run == (0, 4):
            assert links == exact_chain(_whole(before, c), None, store)
            assert is_exact(links, [0, 4], 8)
        return links[1].encoding

    first, second = copied(one), copied(twin)
    assert first.digest == second.digest
    assert (first.parents, second.parents) == ((one,), (twin,))
    assert copied(one) is first and copied(twin) is second
    store.free(one.message)
    assert first.is_given_up and copied(twin) is second


def test_parts_become_copies_of_just_their_tokens(store: MessageStore) -> None:
    messages = _chain_of_three(store)
    a, b = messages["a"], messages["b"]
    beginning, part = exact_chain([Link(a, 0, 4), Link(b, 3, 8)], None, store)
    assert beginning == Link(a, 0, 4)
    assert part == Link(part.encoding, 0, 5)
    assert part.encoding.token_ids == (b.token_ids or [])[3:8]


def test_a_copy_goes_with_any_message_that_it_needs(store: MessageStore) -> None:
    a, b, c = (_encoded(store, name, 4, []) for name in "abc")
    chain = exact_chain(_whole(a, b, c), None, store)
    copies = [link.encoding for link in chain[1:]]
    assert copies_of([a.message]) == copies_of([b.message]) == set(copies)
    assert stats(store, SIZES, "s")["num_copies"] == 2 and counts(store, "s")["num_messages"] == 5
    other = exact_chain(_whole(b, c), None, store)[1].encoding
    store.free(a.message)
    assert all(copy.is_given_up for copy in copies) and not other.is_given_up
    assert [copy for m in store.messages() for copy in m.copies.values()] == [other]
    store.free(b.message)
    assert other.is_given_up and counts(store, "s")["num_messages"] == 1
    # A call that named b before it was freed still gets its copy, for itself alone.
    late = exact_chain(_whole(c, b), None, store)[1].encoding
    assert late.is_given_up and not any(message.copies for message in store.messages())


@given(st.lists(st.integers(1, 9), max_size=5), st.integers(0, 50), st.integers(0, 5), st.data())
def test_positions_of_text_are_those_of_omitted_offsets_and_their_shifts(
    lengths: list[int], shift: int, error: int, data: Any
) -> None:
    offsets, end = resolve_offsets(lengths, None, None)
    check_text_offsets(lengths, None, None)
    check_text_offsets(lengths, [None] * len(lengths), None)
    check_text_offsets(lengths, [a if j == 0 else None for j, a in enumerate(offsets)], None)
    check_text_offsets(lengths, [a + shift for a in offsets], end + shift)
    placed = [a + shift for a in offsets] + [end + shift]
    if lengths and error:
        placed[data.draw(st.integers(0, len(lengths)))] += error
        with pytest.raises(OffsetError, match="exact mode"):
            check_text_offsets(lengths, placed[:-1], placed[-1])


def test_copies_make_room_for_one_another_within_the_limits_of_their_session() -> None:
    store = MessageStore(Pool(), SIZE, session_copies=SessionCopies(6, 1000))
    parts = [_encoded(store, name, 10, []) for name in "abcd"]
    whole = {e: _whole(e)[0] for e in parts}
    for order in permutations(parts, 3):
        links = exact_chain([whole[e] for e in order], None, store)
        assert is_exact(links, [0, 10, 20], 30), "what it needs itself stays"
    copies = [copy for e in parts for copy in e.message.copies.values()]
    assert 2 <= len(copies) <= 6
    store.session_copies.check(copies)
    # Those that a call reads stay, and one that needs more is refused.
    kept = [link.encoding for link in links if link.encoding.is_copy]
    store.residency.wait_for(kept)
    for order in permutations(parts, 3):
        exact_chain([whole[e] for e in order], None, store)
    assert all(copy in copy.message.copies.values() for copy in kept)
    rest = [copy for e in parts for copy in e.message.copies.values() if copy not in kept]
    store.residency.wait_for(rest)
    refused = [order for order in permutations(parts, 4) if _is_refused(order, store)]
    assert refused
    store.residency.leave([*kept, *rest], reading=False)
    assert not _is_refused(refused[0], store)
    # Another session has limits of its own, and who frees messages has all of it back.
    for encoding in parts:
        store.free(encoding.message)
    store.session_copies.check([])


def _is_refused(order: Sequence[Encoding], store: MessageStore) -> bool:
    try:
        exact_chain(_whole(*order), None, store)
    except LimitError as error:
        assert "max_copies_per_session" in str(error)
        return True
    return False


def test_a_copy_of_many_parents_counts_them_all() -> None:
    store = MessageStore(Pool(), SIZE, session_copies=SessionCopies(100, 40))
    parts = [_encoded(store, name, 1, []) for name in "abcdefgh"]
    with pytest.raises(LimitError, match="40 tokens and parents"):
        for _ in range(3):
            exact_chain(_whole(*parts, *parts), None, store)

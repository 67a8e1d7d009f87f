# SPDX-License-Identifier: Apache-2.0
"""Parts that differ from known ones in few tokens, and behind what parts are encoded: on plans."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_choreo.chat.edits import ANCHOR_TOKENS, MIN_NEW_TOKENS, MIN_READ_SHARE
from vllm_choreo.chat.matching import ChatPlan, EntrySpan, Matching, plan_chat
from vllm_choreo.chat.message_table import MAX_CANDIDATES, Entry, MessageTable
from vllm_choreo.chat.parts import ChatPart, Split
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

SEEN = Matching(reads_edits=True)
ALONE = Matching(context="alone", reads_edits=True)
Parts = list[tuple[str, list[int]]]  # roles and tokens


class Tenant:
    """A table, and what each of its messages holds and was encoded behind, as tokens."""

    def __init__(self, max_messages: int = 10_000) -> None:
        self.book = MessageTable(max_messages, 10**9)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.behind: dict[str, tuple[int, ...]] = {}
        self.gone: set[str] = set()

    def ask(self, parts: Parts, how: Matching = SEEN) -> ChatPlan:
        """Plan a chat, and make what it asks for; what it reads are the tokens of the chat."""
        split = split_of(parts)
        plan = plan_chat(split, self.book, how, self._is_live, self._new_id)
        for piece in plan.new:
            self.book.add(piece.entry)
            message = piece.entry.message_id
            self.tokens[message] = piece.token_ids
            self.behind[message] = self.read(piece.parents)
        assert (*self.read(plan.parents), *plan.header) == split.token_ids
        assert plan.num_tokens == len(split.token_ids)
        return plan

    def read(self, readings: Any) -> tuple[int, ...]:
        """The tokens of what is read."""
        return tuple(t for r in readings for t in self.tokens[r.entry.message_id][r.start : r.stop])

    def answered(self, plan: ChatPlan, tokens: tuple[int, ...]) -> Entry:
        entry = plan.answer_entry(self._new_id(), tokens)
        self.tokens[entry.message_id] = tokens
        self.behind[entry.message_id] = self.read(plan.parents)
        self.book.add(entry)
        return entry

    def _is_live(self, entry: Entry) -> bool:
        return entry.message_id not in self.gone

    def _new_id(self) -> str:
        self._count = getattr(self, "_count", 0) + 1
        return f"s/{self._count}"


def split_of(parts: Parts) -> Split:
    """A chat of these parts, with a header of one token."""
    stops = [0]
    for _, tokens in parts:
        stops.append(stops[-1] + len(tokens))
    cut = [ChatPart(a, b, role) for (a, b), (role, _) in zip(pairwise(stops), parts, strict=True)]
    return Split((*(t for _, tokens in parts for t in tokens), 9), tuple(cut))


def text(seed: int, count: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 50_000) for _ in range(count)]


SYSTEM, QUESTION = ("system", text(1, 40)), ("user", text(2, 20))


# -- the edited line -------------------------------------------------------------------------------


def test_what_differs_is_new_and_the_rest_is_read() -> None:
    tenant, known = Tenant(), text(3)
    whole = tenant.ask([SYSTEM, ("user", known), QUESTION])
    edited = [*known[:50], 7, 8, *known[53:]]
    plan = tenant.ask([SYSTEM, ("user", edited), QUESTION])
    (new,) = plan.new
    entry = whole.entries[1]
    start = 50
    assert new.token_ids == tuple(edited[start : start + MIN_NEW_TOKENS])
    assert [(r.entry, r.start, r.stop) for r in plan.parents[1:4]] == [
        (entry, 0, 50),
        (new.entry, 0, MIN_NEW_TOKENS),
        (entry, 100 - (99 - 50 - MIN_NEW_TOKENS), 100),
    ]
    assert tenant.behind[new.entry.message_id] == (*SYSTEM[1], *edited[:50])
    assert plan.report() == {
        "parts": 3,
        "found": 2,
        "edited": 1,
        "found_tokens": 40 + 99 - MIN_NEW_TOKENS + 20,
        "new_tokens": MIN_NEW_TOKENS,
    }
    again = tenant.ask([SYSTEM, ("user", edited), QUESTION])
    assert not again.new and again.parents == plan.parents


def test_a_date_in_the_first_line_changes_every_day_and_costs_its_line() -> None:
    tenant, prompt = Tenant(), text(4, 200)
    tenant.ask([("system", prompt), QUESTION])
    for day in range(1, 40):
        plan = tenant.ask([("system", [*prompt[:5], 100 + day, *prompt[6:]]), QUESTION])
        assert plan.num_new_tokens <= 6 + MIN_NEW_TOKENS and plan.report()["edited"] == 1


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32))
def test_random_edits_are_read_whole(seed: int) -> None:
    """Whatever is inserted, deleted or replaced where: what is read is the chat, token by token
    (`Tenant.ask` looks), and never less than the share that is worth it.
    """
    rng = random.Random(seed)
    tenant, tokens = Tenant(), text(rng.randrange(10), rng.randrange(1, 300))
    for _ in range(5):
        plan = tenant.ask([SYSTEM, ("user", tokens), QUESTION], rng.choice((SEEN, ALONE)))
        spans = [r for r in plan.parents if r.num_tokens < r.entry.num_tokens]
        assert all(r.num_tokens >= ANCHOR_TOKENS for r in spans)
        for number in plan.edited:
            new = sum(len(piece.token_ids) for piece in plan.new if piece.number == number)
            assert new <= (1 - MIN_READ_SHARE) * len(tokens)
        at = rng.randrange(len(tokens) + 1)
        gone = rng.choice((0, 1, 5, 200))
        tokens = tokens[:at] + text(rng.randrange(99), rng.choice((0, 1, 4, 90))) + tokens[at:]
        del tokens[at : at + gone]
        tokens = tokens or [11]


def test_what_is_short_or_has_little_in_common_is_new() -> None:
    tenant, known = Tenant(), text(5)
    tenant.ask([SYSTEM, ("user", known)])
    little = [*known[:30], *text(6, 70)]
    assert not tenant.ask([SYSTEM, ("user", little)]).edited
    short = text(7, 2 * ANCHOR_TOKENS - 1)
    tenant.ask([SYSTEM, ("user", short)])
    assert not tenant.ask([SYSTEM, ("user", [*short[:-1], 7])]).edited


def test_without_the_option_nothing_is_read_in_parts() -> None:
    """As in mode "exact", and in models that keep states."""
    for mode, keeps_states in (("exact", False), ("choreo", True)):
        how = Matching.of(mode, "content", "seen", keeps_states, "", None)
        assert how == Matching()
    tenant, known = Tenant(), text(8)
    tenant.ask([SYSTEM, ("user", known)], how)
    plan = tenant.ask([SYSTEM, ("user", [*known[:50], 7, *known[51:]])], how)
    assert not plan.edited and all(r == EntrySpan.whole(r.entry) for r in plan.parents)
    assert all(entry.token_ids is None for entry in plan.entries)


def test_a_message_that_is_gone_is_read_in_no_part() -> None:
    tenant, known = Tenant(), text(9)
    lost = tenant.ask([SYSTEM, ("user", known)]).entries[1]
    edited = [*known[:50], 7, *known[51:]]
    tenant.gone.add(lost.message_id)
    assert not tenant.ask([SYSTEM, ("user", edited)]).edited
    tenant.book.drop(lost)
    assert lost not in [e for same in tenant.book._heads.values() for e in same]
    assert lost not in [e for same in tenant.book._tails.values() for e in same]


def test_few_of_those_that_begin_alike_are_compared() -> None:
    tenant, head = Tenant(), text(10, ANCHOR_TOKENS)
    for seed in range(20):
        tenant.ask([("user", [*head, *text(100 + seed, 100)])])
    (same,) = [s for s in tenant.book._heads.values() if len(s) > 1]
    assert len(same) == MAX_CANDIDATES


# -- behind what it was encoded --------------------------------------------------------------------


def test_alone_everything_stands_behind_the_beginning() -> None:
    tenant, known = Tenant(), text(11)
    hostile = ("user", text(12))
    plan = tenant.ask([SYSTEM, hostile, ("user", known), QUESTION], ALONE)
    behind = [tenant.behind[e.message_id] for e in plan.entries]
    assert behind == [(), *[tuple(SYSTEM[1])] * 3]
    other = tenant.ask([SYSTEM, ("user", known), QUESTION], ALONE)
    assert not other.new
    # Another beginning is another message; so is what was made without "alone".
    assert len(tenant.ask([("system", text(13)), ("user", known)], ALONE).new) == 2
    assert len(tenant.ask([("user", known)], ALONE).new) == 1
    seen = Tenant()
    seen.ask([SYSTEM, hostile, ("user", known), QUESTION])
    assert len(seen.ask([SYSTEM, ("user", known), QUESTION], ALONE).new) == 3


def test_alone_the_beginning_is_a_chain_of_all_system_messages() -> None:
    tenant = Tenant()
    first, second, later = ("system", text(14)), ("developer", text(15)), ("system", text(16))
    plan = tenant.ask([("", text(17)), first, second, QUESTION, later], ALONE)
    whole = (*text(17), *first[1], *second[1])
    behind = [tenant.behind[e.message_id] for e in plan.entries]
    assert behind == [(), tuple(text(17)), (*text(17), *first[1]), whole, whole]


def test_alone_an_answer_is_read_behind_its_own_text_alone() -> None:
    tenant, said = Tenant(), tuple(text(18))
    plan = tenant.ask([SYSTEM, QUESTION], ALONE)
    answer = tenant.answered(plan, said)
    on = [SYSTEM, QUESTION, ("assistant", list(said)), ("user", text(19))]
    assert tenant.ask(on, ALONE).entries[2] is answer
    asked = ("user", text(20))
    other = tenant.ask([SYSTEM, asked, *on[2:]], ALONE)
    assert answer not in other.entries
    assert tenant.behind[other.entries[2].message_id] == (*SYSTEM[1], *asked[1])
    greeting = tenant.answered(tenant.ask([SYSTEM], ALONE), said)
    assert tenant.ask([SYSTEM, ("assistant", list(said)), QUESTION], ALONE).entries[1] is greeting
    # Nor where parts are cut elsewhere, or without "alone"; nor is one that was made by repair.
    tokens = QUESTION[1]
    halves = [SYSTEM, ("user", tokens[:10]), ("user", tokens[10:]), *on[2:]]
    assert answer not in tenant.ask(halves, ALONE).entries
    assert answer not in tenant.ask(on, SEEN).entries
    repaired = Tenant()
    plan = repaired.ask([SYSTEM, QUESTION], Matching(context="alone", is_repaired=True))
    made = repaired.answered(plan, said)
    assert made not in repaired.ask(on, ALONE).entries


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32))
def test_alone_what_is_read_depends_on_the_chat_alone(seed: int) -> None:
    """Whatever others have sent before: each token that is read has read the same tokens of the
    chat itself: its own part up to it, and the beginning, or for an answer all before it.
    """
    rng = random.Random(seed)
    pool = [text(n, rng.randrange(20, 90)) for n in range(4)]
    pool += [[*one[: len(one) // 2], 7, *one[len(one) // 2 + 1 :]] for one in pool]

    def chat() -> Parts:
        count = rng.randrange(1, 5)
        roles = rng.choices(("system", "user", "assistant"), k=count)
        return [(role, rng.choice(pool)) for role in roles]

    tenant = Tenant()
    for _ in range(6):
        plan = tenant.ask(chat(), rng.choice((SEEN, ALONE, ALONE)))
        if rng.random() < 0.5:
            tenant.answered(plan, tuple(rng.choice(pool)))
    parts = chat()
    plan = tenant.ask(parts, ALONE)
    is_other = [role != "system" for role, _ in parts]
    border = is_other.index(True) if True in is_other else len(parts)
    beginning = [t for _, tokens in parts[:border] for t in tokens]
    readings = iter(plan.parents)
    for number, (role, tokens) in enumerate(parts):
        before = [t for _, one in parts[:number] for t in one]
        context, read = before if number < border or role == "assistant" else beginning, 0
        while read < len(tokens):
            reading = next(readings)
            made_behind = list(tenant.behind[reading.entry.message_id])
            own = [*tokens[:read], *tokens[read : read + reading.num_tokens]]
            held = list(tenant.tokens[reading.entry.message_id][: reading.stop])
            assert [*made_behind, *held] == [*context, *own]
            read += reading.num_tokens
    assert next(readings, None) is None


def test_what_is_no_context_is_refused() -> None:
    from vllm_choreo.chat.matching import check_context

    assert check_context("alone", "context", "choreo") == "alone"
    with pytest.raises(ChoreoError, match="choose one of"):
        check_context("alien", "context", "choreo")
    with pytest.raises(UnsupportedOptionError, match='of mode "choreo"'):
        check_context("seen", "context", "exact")


# -- tenants ---------------------------------------------------------------------------------------


def _num_operations(tenant: Tenant, parts: Parts, how: Matching) -> int:
    """Calls of functions, of C's too, that it takes to look a chat up."""
    count, split = 0, split_of(parts)

    def counting(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        plan_chat(split, tenant.book, how, tenant._is_live, lambda: "s/0")
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("how", [SEEN, ALONE])
def test_another_tenants_chats_are_neither_found_nor_felt(how: Matching) -> None:
    """The work of a lookup is the same, whether another tenant has sent the same, or nothing."""
    parts = [SYSTEM, ("user", text(21)), ("user", text(22)), QUESTION]
    one, other = Tenant(), Tenant()
    one.ask(parts[:2], how)
    before = _num_operations(one, parts, how)
    for seed in range(50):
        other.ask([*parts, ("user", text(1000 + seed))], how)
        other.ask([SYSTEM, ("user", [*text(21)[:50], 7, *text(21)[51:]])], how)
    assert _num_operations(one, parts, how) == before
    assert one.ask(parts, how).report()["found"] == 2


def test_a_lookup_takes_the_same_work_in_a_full_table() -> None:
    """Of one tenant, too: it grows with the chat, not with what is known."""
    parts = [("user", text(23)), ("user", text(24))]
    few, many = Tenant(), Tenant()
    for seed in range(500):
        many.ask([("user", text(2000 + seed))])
    assert _num_operations(few, parts, SEEN) == _num_operations(many, parts, SEEN)

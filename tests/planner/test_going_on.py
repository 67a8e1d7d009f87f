# SPDX-License-Identifier: Apache-2.0
"""Where a chat goes on, exact plans read the call before, with all that it has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from tests.planner.graphs import planner_without
from vllm_choreo.planner import Msg, build, invoke, naive, ops
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.logical.op import Op

SYSTEM, MORE = Msg("system", "You think twice. " * 10), ("Are you sure?", "Really?")
QUESTIONS = ["What is " + "very " * 30 + "old?", "Who is there?"]


def _chat(turns: Sequence[str], name: str = "turn") -> list[Op]:
    """Answers of a chat about the placeholder `q`, one for each turn."""
    said: list[Msg] = [SYSTEM]
    answers: list[Op] = []
    for number, text in enumerate([ops.placeholder("q"), *turns]):
        said.append(Msg("user", text))
        answers.append(ops.llm(said, name=f"{name} {number}"))
        said.append(Msg("assistant", answers[-1]))
    return answers


def _compiled(answers: Sequence[Op]) -> CompiledGraph:
    return build(list(answers)).compile(q=QUESTIONS)


@pytest.mark.parametrize("facade_type", [DigestFacade, AsyncDigestFacade])
def test_what_a_chat_has_said_is_encoded_once(facade_type: Any) -> None:
    compiled, facade = _compiled(_chat(MORE)), facade_type()
    result = invoke(compiled, facade)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    given = "".join(said.text for said in facade.calls)
    answers = [value for values in result for value in values.values()]
    assert [given.count(text) for text in (*QUESTIONS, *answers)] == [1] * 2 + [0] * 6
    assert {said.mode for said in facade.decodes} == {"exact"}
    rows = [line.split("  ")[0] for line in compiled.explain(plan=result.plan).splitlines()
            if "goes on" in line and "prompt of turn 0" in line]  # fmt: skip
    assert set(rows) == {"turn 1"}


def test_turns_that_several_chats_have_behind_an_answer_are_encoded_once() -> None:
    first = ops.llm([SYSTEM, Msg("user", ops.placeholder("q"))], name="first")
    said = [SYSTEM, Msg("user", ops.placeholder("q")), Msg("assistant", first)]
    told = Msg("user", "Now read this. " * 20)
    ends = [ops.llm([*said, told, Msg("user", text)]) for text in ("Long?", "True?", "New?")]
    compiled, facade = _compiled(ends), DigestFacade()
    assert list(invoke(compiled, facade)) == naive(compiled, DigestFacade("baseline"))
    assert sum(said.text.count("Now read this.") for said in facade.calls) == 20 * len(QUESTIONS)


class _Merging(DigestFacade):
    """Whose tokenizer makes one token of two letters, wherever they came from."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text.replace("a1", "+").replace("0b", "-")))


def test_an_answer_that_text_would_read_otherwise_is_text() -> None:
    compiled, facade = _compiled(_chat(MORE)), _Merging(length=lambda prompt: 60)
    result = invoke(compiled, facade)
    assert list(result) == naive(compiled, _Merging("baseline", length=lambda prompt: 60))
    given = "".join(said.text for said in facade.calls)
    earlier = [value for values in result for value in [*values.values()][:-1]]
    is_merged = [("a1" in value or "0b" in value) for value in earlier]
    assert [value in given for value in earlier] == is_merged
    assert {*is_merged} == {True, False}, "both occur"


class _Unknown(DigestFacade):
    """A client, to which the tokenizer is not known."""

    tokenize = None  # type: ignore[assignment]


def test_where_tokens_are_not_known_exact_plans_read_text() -> None:
    compiled, facade = _compiled(_chat(MORE)), _Unknown()
    result = invoke(compiled, facade)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    earlier = [value for values in result for value in [*values.values()][:-1]]
    given = "".join(said.text for said in facade.calls)
    assert all(answer in given for answer in earlier)


@pytest.mark.parametrize(
    ("without", "semantics"), [(("choose", "continue_chats", "cut"), "exact"), ((), "choreo")]
)
def test_only_exact_plans_with_reuse_go_on(without: tuple[str, ...], semantics: str) -> None:
    """Choreographed answers would be others on other workers: there the message is not."""
    compiled = _compiled(_chat(MORE))
    planner = planner_without(DigestFacade(), *without, semantics=semantics)
    result = planner.invoke(compiled)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    assert not result.plan.goes_on


def test_an_answer_of_an_equal_call_is_read_where_it_lies() -> None:
    letters = [ops.llm([Msg("user", f"Letter {i}")], name=f"w{i}") for i in range(24)]
    judge = Msg("system", "You judge. " * 20)
    verdicts = [ops.llm([judge, Msg("user", ops.fmt("Is it {} ?", letter))]) for letter in letters]
    clerks = [
        ops.llm([Msg("system", "You file. " * 20), Msg("user", ops.fmt("{}: {}", str(i), verdict))])
        for i, verdict in enumerate(verdicts)
    ]
    facade = DigestFacade(length=lambda prompt: 1 if "Letter" in prompt else 20)
    result = invoke(build([*verdicts, *clerks]).compile(), facade, semantics="choreo")
    assert result.stats.num_joined > 8
    said = [*result[0].values()][:24]
    given = "".join(call.text for call in facade.calls)
    assert not any(verdict in given for verdict in said), "none is encoded again"
    assert (
        len({f"digest/{n}" for n in range(len(facade.calls))} - facade.freed - facade.pinned) == 0
    )

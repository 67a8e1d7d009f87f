# SPDX-License-Identifier: Apache-2.0
"""What a choreographed plan encodes once though several prompts have it; outputs do not change."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from vllm_choreo import ChoreoError
from vllm_choreo.planner import AnswerCache, Msg, ainvoke, build, invoke, naive, ops
from vllm_choreo.planner.physical.choose import choose
from vllm_choreo.planner.physical.prompts import spell_operators
from vllm_choreo.planner.pipeline import LOGICAL, run_passes
from vllm_choreo.planner.plan import Plan, Target


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_a_fetched_answer_is_encoded_once_for_all_who_read_it(semantics: str) -> None:
    note = ops.llm([Msg("user", ops.placeholder("q"))], name="note")
    readers = [
        ops.llm([Msg("system", role * 20), Msg("user", ops.fmt("Note: {}", note))], name=role)
        for role in ("Judge. ", "Clerk. ", "Guard. ")
    ]
    cache, given = AnswerCache(), {"q": ["one", "two"]}
    options: Any = {"semantics": semantics, "cache": cache}
    notes = invoke(build([note]).compile(**given), DigestFacade(), **options)
    facade, compiled = DigestFacade(), build(readers).compile(**given)
    result = invoke(compiled, facade, **options)
    assert result.plan.num_fetched == 2
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    encoded = [said.text for said in facade.calls if said.kind == "prefill"]
    assert len(encoded) == len(set(encoded)), "roles, what stands before a note, and notes"
    assert set(notes) <= set(encoded) if semantics == "choreo" else not set(notes) & set(encoded)


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_an_input_behind_several_beginnings_is_encoded_once(semantics: str) -> None:
    report = ops.placeholder("report")
    opinions = [
        ops.llm([Msg("system", role * 20), Msg("user", ops.fmt("Read: {}", report))], name=role)
        for role in ("Judge. ", "Clerk. ", "Guard. ")
    ]
    reports = ["It rained for a week. " * 10, "It was dry all year. " * 10]
    compiled, facade = build(opinions).compile(report=[*reports, ""]), DigestFacade()
    result = invoke(compiled, facade, semantics=semantics)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    counts = [sum(said.text.count(text) for said in facade.calls) for text in reports]
    assert counts == ([1, 1] if semantics == "choreo" else [3, 3])
    rows = [line.split() for line in compiled.explain(plan=result.plan).splitlines()]
    assert (["report", "message"] in [row[1:3] for row in rows]) == (semantics == "choreo")


def test_an_input_behind_one_beginning_is_exact() -> None:
    report = ops.placeholder("report")
    turns = [Msg("system", "You read. " * 20), Msg("user", report)]
    answers = [ops.llm([*turns, Msg("user", text)]) for text in ("Long?", "True?", "New?")]
    compiled, facade = build(answers).compile(report=["It rained. " * 20]), DigestFacade()
    result = invoke(compiled, facade, semantics="choreo")
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    assert {said.mode for said in facade.decodes} == {"exact"}


def test_a_fetched_answer_of_one_reader_is_text() -> None:
    options: Any = {"semantics": "choreo", "cache": AnswerCache()}
    q = ops.placeholder("q")
    note = ops.llm([Msg("user", q)], name="note")
    notes = invoke(build([note]).compile(q=["one"]), DigestFacade(), **options)
    facade = DigestFacade()
    final = ops.llm([Msg("user", ops.fmt("Improve: {}", note))], name="final")
    invoke(build([final]).compile(q=["one"]), facade, **options)
    assert [said.kind for said in facade.calls] == ["decode"] and notes[0] in facade.calls[0].header


def test_behind_a_message_there_is_no_shared_beginning() -> None:
    long, short = (ops.llm([Msg("user", text)], name=text) for text in ("long", "short"))
    turns = [Msg("system", "You judge. " * 20), Msg("user", ops.fmt("{} {}", long, short))]
    judges = [ops.llm([*turns, Msg("user", text)]) for text in ("Who?", "Why?", "When?", "How?")]
    graph = build(judges)
    names = {node.name: number for number, node in enumerate(graph.nodes)}
    sizes = {names["long"]: 90.0, names["short"]: 1.5}
    plan = run_passes(Plan(graph.compile(), Target("choreo")), LOGICAL)
    plan = replace(plan, sizes=[sizes.get(number, 20.0) for number in range(len(graph.nodes))])
    for (_, read), choice in choose(spell_operators(plan)).choices.items():
        assert choice.how == ("message" if read == names["long"] else "again")
        assert ("prefix" in choice.costs) == (read == names["long"])


def test_what_a_call_reads_apart_is_encoded_at_once() -> None:
    facade = _Together()
    notes = [ops.llm([Msg("user", f"Note {i}")], name=f"note {i}") for i in range(3)]
    parts = [part for i, note in enumerate(notes) for part in (f"\nHere is number {i}: ", note)]
    read = ops.fmt("{}" * len(parts), *parts)
    judges = [
        ops.llm([Msg("system", role * 20), Msg("user", read)]) for role in ("Judge. ", "Clerk. ")
    ]
    asyncio.run(ainvoke(build(judges).compile(), facade, semantics="choreo"))
    assert facade.most_prefills >= 3


class _Together(AsyncDigestFacade):
    """Knows how many messages it has encoded at the same time."""

    most_prefills = prefills = 0

    async def prefill(self, tokens: Any, **options: Any) -> Any:
        self.prefills += 1
        self.most_prefills = max(self.most_prefills, self.prefills)
        await asyncio.sleep(0.01)
        self.prefills -= 1
        return await super().prefill(tokens, **options)


def test_what_was_on_its_way_for_a_refused_call_is_freed() -> None:
    facade = _Refusing()
    notes = [ops.llm([Msg("user", f"Note {i}")], name=f"note {i}") for i in range(2)]
    read = ops.fmt("\nBad: {}\nGood: {}", *notes)
    judges = [
        ops.llm([Msg("system", role * 20), Msg("user", read)]) for role in ("Judge. ", "Clerk. ")
    ]
    result = asyncio.run(ainvoke(build(judges).compile(), facade, semantics="choreo"))
    assert "refused" in str(result.errors[0])
    assert any("Good" in said.text for said in facade.calls)
    made = {f"digest/{number}" for number in range(len(facade.calls))}
    assert made - facade.freed <= facade.pinned


class _Refusing(AsyncDigestFacade):
    """Refuses one text at once, and takes long for the others."""

    async def prefill(self, tokens: Any, **options: Any) -> Any:
        if "Bad" in tokens:
            raise ChoreoError("refused")
        await asyncio.sleep(0.2)
        return await super().prefill(tokens, **options)


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_equal_questions_have_one_answer(semantics: str) -> None:
    writers = [ops.llm([Msg("user", f"Letter {i}")], name=f"w{i}") for i in range(20)]
    judge = Msg("system", "You judge. " * 20)
    judges = [
        ops.llm([judge, Msg("user", ops.fmt("Is it {} ?", writer))], name=f"j{i}")
        for i, writer in enumerate(writers)
    ]
    letter = DigestFacade(length=lambda prompt: 1 if "Letter" in prompt else 20)
    result = invoke(build(writers + judges).compile(), letter, semantics=semantics)
    values = list(result[0].values())
    answers: dict[str, set[str]] = {}
    for written, judged in zip(values[:20], values[20:], strict=True):
        answers.setdefault(written, set()).add(judged)
    assert len(answers) <= 16 and all(len(found) == 1 for found in answers.values())
    assert result.stats.num_joined == 20 - len(answers)

# SPDX-License-Identifier: Apache-2.0
"""What a choreographed plan encodes once though several prompts have it; outputs do not change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.facades import DigestFacade
from vllm_choreo.planner import AnswerCache, Msg, build, invoke, naive, ops


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
    assert result.plan.logical.num_fetched == 2
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

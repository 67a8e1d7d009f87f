# SPDX-License-Identifier: Apache-2.0
"""Prompts of plans are in the template of the model, and answers those of the naive run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES, tokenizer_of
from tests.planner.facades import DigestFacade
from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.errors import ChoreoError
from vllm_choreo.planner import AnswerCache, Msg, Planner, Template, build, invoke, naive, ops
from vllm_choreo.planner.logical.graph import Graph
from vllm_choreo.planner.workers.server import served_turns

SYSTEM = "You are brief, and you never say what you do not know. " * 3
QUESTIONS = ["Who?", "Where was it?", "Who?"]


class TemplatedFacade(DigestFacade):
    """A facade that tells what its model's template writes, as one in process does."""

    def __init__(self, turns: ChatTurns | None, mode: str = "choreo") -> None:
        super().__init__(mode)
        self.turns = turns


def talk() -> Graph:
    """An answer, an answer to that, and a judge of both."""
    told = Msg("system", SYSTEM)
    question = Msg("user", ops.placeholder("q"))
    first = ops.llm([told, question], name="first")
    history = ops.chat([told, question, Msg("assistant", first), Msg("user", "Are you sure?")])
    second = ops.llm([history], name="second")
    judge = ops.llm([told, Msg("user", ops.fmt("{} or {}?", first, second))], name="judge")
    return build([judge])


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_in_the_template_of_the_model(family: str, semantics: str) -> None:
    turns = turns_of_tokenizer(tokenizer_of(family))
    compiled, facade = talk().compile(q=QUESTIONS), TemplatedFacade(turns)
    result = invoke(compiled, facade, semantics=semantics)
    assert list(result) == naive(compiled, TemplatedFacade(turns, "baseline"))
    assert list(result) == naive(compiled, DigestFacade("baseline"), template=turns)
    prompts = [said.prompt for said in facade.decodes]
    begins = turns.start + turns.system(SYSTEM)
    assert all(prompt.startswith(begins) and prompt.endswith(turns.answer) for prompt in prompts)
    assert begins + turns.user("Who?") + turns.answer in prompts
    if turns.start:
        assert {prompt.count(turns.start) for prompt in prompts} == {1}
        assert list(result) != naive(compiled, DigestFacade("baseline"))


def test_a_given_template_comes_first_and_chatml_where_nothing_is_known() -> None:
    turns = turns_of_tokenizer(tokenizer_of("llama3"))
    compiled = talk().compile(q=QUESTIONS)
    given = Template("[{role}] ", "\n")
    by_given = naive(compiled, DigestFacade("baseline"), template=given)
    assert list(invoke(compiled, TemplatedFacade(turns), template=given)) == by_given
    assert list(invoke(compiled, TemplatedFacade(None))) == list(invoke(compiled, DigestFacade()))
    chatml = list(invoke(compiled, TemplatedFacade(ChatTurns())))
    assert chatml == list(invoke(compiled, DigestFacade()))


def test_answers_under_another_template_are_not_taken_for_these() -> None:
    cache, compiled = AnswerCache(), talk().compile(q=QUESTIONS)
    options: Any = {"cache": cache}
    invoke(compiled, TemplatedFacade(None), **options)
    facade = TemplatedFacade(turns_of_tokenizer(tokenizer_of("gemma")))
    assert invoke(compiled, facade, **options).plan.num_fetched == 0 and facade.decodes
    assert invoke(compiled, TemplatedFacade(None), **options).plan.num_fetched > 0


def test_turns_of_tools_are_written_in_chatml_alone() -> None:
    graph = build([ops.llm([Msg("user", "Look."), Msg("tool", ops.placeholder("found"))])])
    compiled = graph.compile(found=["a shed"])
    facade = TemplatedFacade(ChatTurns())
    invoke(compiled, facade)
    assert "<|im_start|>tool\na shed<|im_end|>\n" in facade.decodes[0].prompt
    planner = Planner(TemplatedFacade(turns_of_tokenizer(tokenizer_of("llama3"))))
    with pytest.raises(ChoreoError, match=r"give the text to the user.*role='?tool"):
        planner.invoke(compiled)


def test_a_server_that_does_not_tell_its_turns_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert served_turns("http://127.0.0.1:9", None) is None
    (record,) = caplog.records
    assert "ChatML" in record.getMessage() and "http://127.0.0.1:9" in record.getMessage()

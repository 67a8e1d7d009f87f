# SPDX-License-Identifier: Apache-2.0
"""What prompts begin with alike is encoded once, within a turn, too, where tokens end there."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.planner import Msg, build, invoke, naive, ops
from vllm_choreo.planner.execute import shared_messages
from vllm_choreo.planner.execute.read import drop_inexact_links, reading
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.workers.facade import FacadeWorker
from vllm_choreo.testing.models.embedded import embedded_model

SYSTEM = Msg("system", "You look things up. " * 10)
CONTEXTS = [
    "Anna owns a red bicycle and " + "a green shed, " * 20 + end
    for end in ("yes, " * 30 + "so it is said.", "no, " * 30 + "it is denied.")
]
QUESTIONS = ["What is there?", "Whose is it?", "Is it red, or green?"]


def _compiled() -> CompiledGraph:
    """All questions about both contexts, and a second call that reads the first one's answer."""
    asked = ops.fmt("{}\n\nQuestion: {}", ops.placeholder("context"), ops.placeholder("question"))
    answer = ops.llm([SYSTEM, Msg("user", asked)], name="answer")
    check = ops.llm(
        [SYSTEM, Msg("user", ops.fmt("{}\nIs that so: {}", asked, answer))], name="check"
    )
    pairs = list(itertools.product(CONTEXTS, QUESTIONS))
    return build({"answer": answer, "check": check}).compile(
        context=[context for context, _ in pairs], question=[question for _, question in pairs]
    )


@pytest.mark.parametrize("facade_type", [DigestFacade, AsyncDigestFacade])
def test_a_context_of_several_questions_is_encoded_once(facade_type: Any) -> None:
    compiled, facade = _compiled(), facade_type()
    assert list(invoke(compiled, facade)) == naive(compiled, DigestFacade("baseline"))
    given = "".join(said.text for said in facade.calls)
    assert given.count("Anna owns") == 1, "with which both contexts begin"
    assert given.count("so it is said.") == given.count("it is denied.") == 1
    assert {said.mode for said in facade.decodes} == {"exact"}


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_inputs_that_begin_alike_are_encoded_once(semantics: str) -> None:
    answer = ops.llm([SYSTEM, Msg("user", ops.placeholder("asked"))])
    pairs = itertools.product(CONTEXTS, QUESTIONS)
    compiled = build([answer]).compile(asked=[f"{context}\n\n{text}" for context, text in pairs])
    facade = DigestFacade()
    result = invoke(compiled, facade, semantics=semantics)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    given = "".join(said.text for said in facade.calls)
    assert given.count("Anna owns") == given.count("so it is said.") == 1


class _Counting(AsyncDigestFacade):
    """A facade that counts what it holds."""

    most = 0

    async def prefill(self, tokens: Any, **options: Any) -> Any:  # type: ignore[override]
        found = await super().prefill(tokens, **options)
        self.most = max(self.most, len(self.calls) - len(self.freed))
        return found


@pytest.mark.parametrize("turns", [1, 2])
def test_beginnings_that_nobody_reads_are_freed_before_the_end(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(shared_messages, "MAX_SHARED", 10)
    contexts = [f"Of place {i} all is told: " + f"{i} houses, " * 20 for i in range(120)]
    said = [SYSTEM, Msg("user", ops.placeholder("asked"))]
    answers = [ops.llm(said)]
    if turns == 2:
        said += [Msg("assistant", answers[0]), Msg("user", "Are you sure?")]
        answers.append(ops.llm(said))
    compiled = build(answers).compile(asked=[f"{c}{q}" for c in contexts for q in QUESTIONS])
    facade = _Counting()
    assert list(invoke(compiled, facade)) == naive(compiled, DigestFacade("baseline"))
    given = "".join(said.text for said in facade.calls)
    assert all(given.count(f"Of place {i} all") == 1 for i in range(120)), "none is encoded twice"
    assert facade.most < 120 or turns == 2, "a chat goes on from what it has read"
    held = len(facade.calls) - len(facade.freed | facade.pinned)
    assert held == 0


class _Merging(DigestFacade):
    """A facade whose tokenizer makes one token of what stands around a question's beginning."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text.replace("Question: ", "+")))


def test_a_beginning_that_ends_within_a_token_is_not_shared() -> None:
    compiled, facade = _compiled(), _Merging()
    assert list(invoke(compiled, facade)) == naive(compiled, DigestFacade("baseline"))
    shared = [said.text for said in facade.calls if said.kind == "prefill"]
    assert not any(text.endswith("Question:") for text in shared)
    assert any(text.endswith("shed,") for text in shared), "where no token is cut it is"


class _Unknown(DigestFacade):
    """A client, to which the tokenizer is not known."""

    tokenize = None  # type: ignore[assignment]


def test_where_tokens_are_not_known_turns_stay_whole() -> None:
    compiled, facade = _compiled(), _Unknown()
    assert list(invoke(compiled, facade)) == naive(compiled, DigestFacade("baseline"))
    given = "".join(said.text for said in facade.calls)
    assert given.count("Anna owns") == 2 * len(CONTEXTS) * len(QUESTIONS)


class _Behind(AsyncDigestFacade):
    """A client of a server whose proxy does not pass on `/tokenize`."""

    async def tokenize(self, text: str) -> tuple[int, ...]:  # type: ignore[override]
        raise ChoreoError("no such path")


def test_who_cannot_ask_for_tokens_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = _compiled()
    assert list(invoke(compiled, _Behind())) == naive(compiled, DigestFacade("baseline"))
    assert [record.getMessage() for record in caplog.records] == [
        "Tokens are not told, so exact plans encode more: no such path"
    ]


class _Tokenizing(DigestFacade):
    """A facade with the tokenizer of the model of the demo."""

    def __init__(self) -> None:
        super().__init__()
        self._tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


_FACADE = _Tokenizing()


@given(
    text=st.text(st.sampled_from("ab 1.,'\n\tÄ語<|im_end|>"), min_size=1, max_size=60),
    at=st.lists(st.integers(1, 59), max_size=6, unique=True),
    turn=st.integers(0, 60),
)
def test_links_have_the_tokens_of_the_whole_text(text: str, at: list[int], turn: int) -> None:
    closing = "<|im_end|>\n"
    text = text[:turn] + closing + "<|im_start|>" + text[turn:]
    ends = sorted({place for place in at if place < len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]
    read = reading(pieces, range(len(ends)))
    worker = FacadeWorker(_FACADE)
    found = asyncio.run(drop_inexact_links(worker, read, lambda text: text.endswith(closing)))
    links = [*found.chain, found.header]
    assert "".join(links) == text
    apart = tuple(itertools.chain(*map(_FACADE.tokenize, links)))
    assert apart == _FACADE.tokenize(text)

# SPDX-License-Identifier: Apache-2.0
"""A plan on a model that writes no ChatML: its prompts are what its own template writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES
from tests.engine.byte_model import make_family_model
from vllm_choreo import Choreography
from vllm_choreo.planner import FacadeWorker, Msg, build, invoke, naive, ops
from vllm_choreo.planner.logical.graph import Graph

FAMILY = FAMILIES["mistral"]
SAMPLING = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("mistral"), FAMILY)


@pytest.fixture
def llm(engine_slot: Callable[..., Any], model: Path) -> Any:
    return engine_slot(model)


def team() -> Graph:
    """Three who answer the same question, each told the answers before."""
    question = Msg("user", ops.fmt("It is long, and read by all of them: {}", ops.placeholder("q")))
    said: list[Any] = []
    for name in ("Anna", "Bert", "Carl"):
        heard = [Msg("user", ops.fmt(f"{name} hears: {{}}", one)) for one in said]
        said.append(ops.llm([question, *heard], name=name, sampling=SAMPLING))
    return build(said)


def test_the_first_call_reads_what_the_template_writes(llm: Any) -> None:
    """The oracle is the model's tokenizer, which renders and encodes the chat by itself."""
    tokenizer, text = llm.get_tokenizer(), "It is long, and read by all of them: Why?"
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
    asked: list[list[int]] = []

    class Recorder(FacadeWorker):
        async def decode(self, *given: Any) -> Any:
            answer = await super().decode(*given)
            asked.append(list(answer.message.token_ids[: answer.num_prompt]))
            return answer

    with Choreography(llm, mode="baseline") as c:
        naive(team().compile(q=["Why?"]), Recorder(c))
    assert asked[0] == tokens and tokens[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_plans_on_the_engine(llm: Any, semantics: str) -> None:
    compiled = team().compile(q=["Why?", "Who was it?", "Why?"])
    with Choreography(llm, mode="baseline") as c:
        expected = naive(compiled, c)
    with Choreography(llm) as c:
        found = list(invoke(compiled, c, semantics=semantics))
    assert len(found) == 3 and found[0] == found[2]
    if semantics == "exact":
        assert found == expected

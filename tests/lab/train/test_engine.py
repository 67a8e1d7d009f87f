# SPDX-License-Identifier: Apache-2.0
"""What the trainer computes of recorded runs is what the engine computed when they ran."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.choreographies import draw_choreography, run_choreography
from tests.engine.test_auto import TEMPLATE, turn, words
from tests.grids import sampled
from tests.lab.train.packings import load, packed_model
from tests.lab.train.recordings import TURNS
from vllm_choreo import Choreography
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loss import (
    adapted_calls,
    cross_entropy,
    text_logprobs,
    trained_logprobs,
)
from vllm_choreo.lab.train.packing import pack
from vllm_choreo.lab.train.pieces import ContentCutter, pieces_of
from vllm_choreo.lab.train.recorded import calls_of, check_recorded_as_text
from vllm_choreo.semantics.message import Message
from vllm_choreo.trained_adapter import PLACEMENTS
from vllm_choreo.transcript.transcript import Transcript

TOLERANCE = 1e-4
_SAMPLING = SamplingParams(temperature=1.0, seed=5, max_tokens=7, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture(scope="module")
def chat_model_path(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chats") / "llama"
    shutil.copytree(tiny_model_path("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def llm(engine_slot: Callable[..., Any], chat_model_path: Path) -> Any:
    return engine_slot(chat_model_path, enable_lora=True, max_loras=1, max_lora_rank=8)


def _saved(mode: str, messages: Sequence[Message]) -> Transcript:
    """A transcript, as it is read from a file."""
    transcript = Transcript("drawn", mode)
    for message in messages:
        transcript.add("all", "somebody", message)
    return Transcript.from_json(json.loads(json.dumps(transcript.to_json())))


def _assert_reported(logprobs: torch.Tensor, messages: Sequence[Message]) -> None:
    """All log-probabilities that the engine reported are those of `logprobs`, row by row."""
    reported = [entry for message in messages for entry in message.logprobs or ()]
    assert len(reported) == len(logprobs) > 0
    for row, entry in zip(logprobs, reported, strict=True):
        ids = torch.tensor(list(entry))
        expected = torch.tensor([value.logprob for value in entry.values()])
        torch.testing.assert_close(row[ids], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", sampled(range(60, 66), 2))
def test_random_choreographies(llm: Any, tiny_model_path: Callable[[str], Path], seed: int) -> None:
    with Choreography(llm) as c:
        messages = [ran.message for ran in run_choreography(c, draw_choreography(seed))]
    packing = pack(calls_of(_saved("choreo", messages)))
    with torch.no_grad():
        found = trained_logprobs(packed_model(tiny_model_path("llama")), packing)
    _assert_reported(found, messages)


def _program(c: Any) -> list[Message]:
    """Two documents, the second moved; a reader of parts; a reader of an answer."""
    first = c.prefill(list(range(10, 40)))
    second = c.prefill(list(range(50, 90)), parents=[first], new_offset=64)
    answer = c.decode(
        [7, 8, 9],
        parents=[second, (first, 3, 20)],
        offsets=[0, 30],
        new_offset=55,
        sampling_params=_SAMPLING,
    )
    last = c.decode([11, 12], parents=[answer, second], sampling_params=_SAMPLING)
    return [first, second, answer, last]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements(
    llm: Any, adapter: Adapter, tiny_model_path: Callable[[str], Path], placement: str
) -> None:
    """One packed forward with a gated adapter; the engine applies it where its folder says."""
    with Choreography(llm, adapter=adapter.placed(placement)) as c:
        messages = _program(c)
    base = load(tiny_model_path("llama"))
    model = PackedModel(peft.PeftModel.from_pretrained(base, str(adapter.path)))
    packing = pack(calls_of(_saved("choreo", messages)))
    with torch.no_grad():
        found = trained_logprobs(model, packing, adapted_calls(packing, placement))
    _assert_reported(found, messages)


def test_a_run_as_text_is_trained_on_as_choreographed(
    llm: Any, tiny_model_path: Callable[[str], Path]
) -> None:
    """Its outputs are the text's, its places those that the program asked for."""
    with Choreography(llm, mode="baseline") as c:
        messages = _program(c)
    with Choreography(llm) as c:
        places = [call.new_offset for call in calls_of(_saved("choreo", _program(c)))]
    transcript = _saved("baseline", messages)
    check_recorded_as_text(transcript)
    calls = calls_of(transcript)
    assert [call.new_offset for call in calls] == places == [0, 64, 55, 50]
    assert [span.offset for span in calls[2].parents] == [0, 30]
    packing, model = pack(calls), packed_model(tiny_model_path("llama"))
    text = text_logprobs(model, packing)
    _assert_reported(text, messages)
    with torch.no_grad():
        found = trained_logprobs(model, packing)
    assert float((found - text).abs().max()) > 0.1  # choreographed, it is another computation
    assert float(cross_entropy(text, packing)) > 0


@pytest.mark.parametrize("adapted", [False, True])
def test_a_text_that_is_cut_is_trained_on_as_it_is_served(
    llm: Any, adapter: Adapter, chat_model_path: Path, adapted: bool
) -> None:
    """`choreo_auto` with cuts and the context "alone": the same pieces behind the same beginning,
    encoded by the adapter, and an answer by the model without it.
    """
    chat = [turn("system", words(1)), turn("user", words(2, 500))]
    given = {"adapter": adapter.placed("prefill")} if adapted else {}
    with Choreography(llm, **given) as c:
        answer = c.chat(
            chat, auto="choreo", cut="content", context="alone", sampling_params=_SAMPLING
        )
    assert not answer.usage.exact
    # Recorded as text, by a program that says the system's turn and the user's apart.
    with Choreography(llm, mode="baseline") as c:
        system = c.prefill(TURNS.system(chat[0]["content"]))
        header = TURNS.user(chat[1]["content"]) + TURNS.assistant()
        said = c.decode(header, parents=[system], sampling_params=_SAMPLING)
    num_given = said.num_tokens - len(said.generated_token_ids)
    tokens = (*said.token_ids[:num_given], *answer.generated_token_ids)
    said = replace(said, token_ids=tokens, generated_token_ids=answer.generated_token_ids)
    transcript = _saved("baseline", [system, said])
    transcript.inputs["turns"] = TURNS.to_json()
    calls = pieces_of(transcript, ContentCutter.of(str(chat_model_path), 128))
    assert len(calls) > 4

    base = load(chat_model_path)
    model = PackedModel(peft.PeftModel.from_pretrained(base, str(adapter.path)))
    packing = pack(calls)
    with torch.no_grad():
        by = adapted_calls(packing, "prefill") if adapted else [False] * len(calls)
        found = trained_logprobs(model, packing, by)
    _assert_reported(found, [answer])
    text = text_logprobs(model, packing)
    assert float((found - text).abs().max()) > 0.1

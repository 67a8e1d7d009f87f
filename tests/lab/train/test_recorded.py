# SPDX-License-Identifier: Apache-2.0
"""Transcripts as packed calls, and the losses on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.engine.adapters import MODULES
from tests.lab.train.packings import load
from tests.transcript.transcripts import debate
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loss import (
    adapted_calls,
    cross_entropy,
    divergence,
    text_logprobs,
    trained_logprobs,
)
from vllm_choreo.lab.train.packing import PackedCall, SeenSpan, pack, pack_as_text
from vllm_choreo.lab.train.recorded import calls_of, check_recorded_as_text
from vllm_choreo.transcript.transcript import Transcript


def _recorded(mode: str = "baseline", **of_last: Any) -> Transcript:
    data = debate(mode, rounds=2)
    data["steps"][-1].update(of_last)
    return Transcript.from_json(data)


def test_who_reads_whom_where() -> None:
    transcript = _recorded()
    calls = calls_of(transcript)
    # The question, the instruction, three agents, then two rounds of three answers.
    assert len(calls) == 11 and [call.is_decode for call in calls] == [False] * 5 + [True] * 6
    assert calls[1].parents == (SeenSpan(0, 0, 20, 0),) and calls[1].new_offset == 20
    answers = [len(call.token_ids) for call in calls[5:8]]
    ends = [20 + sum(answers[:i]) for i in range(4)]
    assert calls[9].parents == (
        SeenSpan(3, 0, 20, 0),
        *(SeenSpan(5 + i, 0, answers[i], ends[i]) for i in range(3)),
        SeenSpan(0, 2, 9, ends[3]),
    )
    assert calls[9].new_offset == ends[3] + 7
    assert calls[9].num_generated == len(transcript.steps[9].message.generated_token_ids) > 0


def test_places_that_were_asked_for() -> None:
    count = len(_recorded().steps[-1].message.parents)
    asked = list(range(100, 100 + count))
    last = calls_of(_recorded(offsets=asked, new_offset=7))[-1]
    assert [span.offset for span in last.parents] == asked and last.new_offset == 7
    partly = calls_of(_recorded(offsets=[100, *[None] * (count - 1)]))[-1]
    lengths = [span.stop - span.start for span in partly.parents]
    assert [span.offset for span in partly.parents] == [
        100 + sum(lengths[:i]) for i in range(count)
    ]
    with pytest.raises(ValueError, match=r"steps\[10\]\.offsets must be"):
        _recorded(offsets="all")


def test_bad_transcripts_are_refused() -> None:
    with pytest.raises(ChoreoError, match="'nobody', which no step before it made"):
        calls_of(_recorded(parents=[["nobody", None, None]]))
    with pytest.raises(ChoreoError, match="has 20 tokens"):
        calls_of(_recorded(parents=[["s/0", 3, 21]]))
    with pytest.raises(ChoreoError, match="its offsets were not recorded"):
        calls_of(_recorded("choreo"))
    with pytest.raises(ChoreoError, match="mode baseline or exact"):
        check_recorded_as_text(_recorded("choreo"))
    silent = _recorded()
    silent.steps = silent.steps[:5]
    with pytest.raises(ChoreoError, match="without outputs"):
        check_recorded_as_text(silent)


def test_placements() -> None:
    packing = pack([PackedCall((5, 6)), PackedCall((7, 8), (SeenSpan(0, 0, 2, 0),), 2, 1)])
    assert adapted_calls(packing, "prefill") == (True, False)
    assert adapted_calls(packing, "decode") == (False, True)
    assert adapted_calls(packing, "both") == (True, True)
    with pytest.raises(ChoreoError, match="placement must be one of"):
        adapted_calls(packing, "nobody")


@pytest.fixture(scope="module")
def model(tiny_model_path: Callable[[str], Path]) -> PackedModel:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=8, target_modules=list(MODULES), lora_dropout=0.05)
    return PackedModel(peft.get_peft_model(load(tiny_model_path("llama")), config))


def test_the_text_is_what_the_base_model_says(
    model: PackedModel, tiny_model_path: Callable[[str], Path]
) -> None:
    """Whatever the adapter holds, and without dropout."""
    packing = pack(calls_of(_recorded()))
    changed = copy.deepcopy(model.model.state_dict())
    for name, value in model.model.state_dict().items():
        if "lora_B" in name:
            value += 1.0
    found = text_logprobs(model, packing)
    model.model.load_state_dict(changed)
    plain = load(tiny_model_path("llama"))
    text, rows = pack_as_text(packing), []
    for i, call in enumerate(text.calls):
        with torch.no_grad():
            logits = plain(text.token_ids[text.rows(i)][None]).logits[0]
        rows.append(logits.log_softmax(-1)[-call.num_generated - 1 : -1])
    torch.testing.assert_close(found, torch.cat(rows), rtol=0, atol=1e-4)


@pytest.mark.exhaustive  # test_loop.py trains on recorded runs in every run
@pytest.mark.parametrize("placement", ["prefill", "decode", "both"])
def test_a_few_steps_come_nearer_to_the_text(
    model: PackedModel, tiny_model_path: Callable[[str], Path], placement: str
) -> None:
    """Of either loss, in any placement."""
    start = copy.deepcopy(model.model.state_dict())
    packing = pack(calls_of(_recorded()))
    adapted = adapted_calls(packing, placement)
    text = text_logprobs(model, packing)
    for loss in (
        lambda logprobs: divergence(logprobs, text),
        lambda logprobs: cross_entropy(logprobs, packing),
    ):
        model.model.load_state_dict(start)
        parameters = [p for p in model.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=5e-3)
        losses = []
        for _ in range(6):
            value = loss(trained_logprobs(model, packing, adapted))
            losses.append(float(value.detach()))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        assert losses[-1] < 0.95 * losses[0], losses
    model.model.load_state_dict(start)

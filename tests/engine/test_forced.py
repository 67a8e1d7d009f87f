# SPDX-License-Identifier: Apache-2.0
"""Forced tokens: sampled as told, computed in full, and nobody else is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt

FORCED = "vllm_choreo.engine.worker.forced:ForcedTokens"
PROMPT = [7, 301, 44, 9, 120, 33]


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), logits_processors=(FORCED,))


def generate(llm: Any, *params: SamplingParams) -> list[Any]:
    prompts = [TokensPrompt(prompt_token_ids=[*PROMPT, i]) for i in range(len(params))]
    outputs = llm.generate(prompts, list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def forcing(tokens: list[int], **options: Any) -> SamplingParams:
    options = {"temperature": 0.0, "max_tokens": len(tokens), **options}
    return SamplingParams(ignore_eos=True, extra_args={"forced_tokens": tokens}, **options)


def test_requests_of_one_batch_are_forced_each_to_its_own_or_not_at_all(llm: Any) -> None:
    """Lengths differ, so that requests leave the batch and others move to their rows."""
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (_, expected) = generate(llm, free, free)
    short, long = [3, 4], [(37 * i) % 512 for i in range(15)]
    outputs = generate(llm, forcing(short), free, forcing(long, temperature=1.0, seed=1))
    assert list(outputs[0].token_ids) == short
    assert outputs[1].token_ids == expected.token_ids
    assert list(outputs[2].token_ids) == long


def test_what_is_forced_is_computed_in_full(llm: Any) -> None:
    """Logprobs stay the model's: they are those of the same tokens given as a prompt."""
    forced = [5, 410, 2, 77]
    (output,) = generate(llm, forcing(forced, logprobs=0))
    prompt = TokensPrompt(prompt_token_ids=[*PROMPT, 0, *forced])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (whole,) = llm.generate(prompt, params, use_tqdm=False)
    expected = [step[token].logprob for step, token in zip(
        whole.prompt_logprobs[-len(forced):], forced, strict=True)]  # fmt: skip
    found = [step[token].logprob for step, token in zip(output.logprobs, forced, strict=True)]
    assert found == pytest.approx(expected, abs=1e-3)
    assert max(found) < -0.01, "no certainty"


def test_a_forced_token_overrides_what_other_options_forbid(llm: Any) -> None:
    options = {"allowed_token_ids": [9], "logit_bias": {8: 50.0}, "temperature": 0.5}
    (output,) = generate(llm, forcing([11, 12], **options))
    assert list(output.token_ids) == [11, 12]


def test_after_the_list_and_outside_the_vocabulary_sampling_is_free(llm: Any) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (expected,) = generate(llm, free)
    start = list(expected.token_ids[:2])
    outputs = generate(llm, forcing(start, max_tokens=4))
    assert outputs[0].token_ids == expected.token_ids
    outputs = generate(llm, forcing([*start, 10**6, 6]))
    assert list(outputs[0].token_ids) == [*expected.token_ids[:3], 6]


@pytest.mark.parametrize("bad", [[], "7", 7, [1.0], [True], [-1], (1, 2), [None]])
def test_other_values_are_refused_before_they_reach_the_engine(llm: Any, bad: Any) -> None:
    with pytest.raises(VLLMValidationError, match="forced_tokens"):
        generate(llm, SamplingParams(extra_args={"forced_tokens": bad}))
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_preempted_request_goes_on_where_it_was(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    options = {"logits_processors": (FORCED,), "num_gpu_blocks_override": 9}
    llm = engine_slot(tiny_model_path("llama"), max_model_len=256, **options)
    lists = [[(37 * i + k) % 512 for i in range(90)] for k in range(4)]
    outputs = generate(llm, *map(forcing, lists))
    assert [list(output.token_ids) for output in outputs] == lists

# SPDX-License-Identifier: Apache-2.0
"""Seeded sampling where a prompt is prefilled in several steps."""

from __future__ import annotations

import pytest
from vllm import LLM, SamplingParams

from vllm_choreo import Choreography

SEEDED = SamplingParams(seed=1, temperature=1.0, max_tokens=12, ignore_eos=True)
OTHER = SamplingParams(seed=2, temperature=1.0, max_tokens=12, ignore_eos=True)
# Longer than the 256 tokens of a step.
LONG = [5 + i % 300 for i in range(600)]


@pytest.fixture
def llm(plain_llama: LLM) -> LLM:
    return plain_llama


def tokens(llm: LLM, *calls: tuple[list[int], SamplingParams]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in calls]
    outputs = llm.generate(prompts, [params for _, params in calls], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_seed_decides_however_many_steps_the_prompt_takes(llm: LLM) -> None:
    in_steps = tokens(llm, (LONG, SEEDED))
    at_once = tokens(llm, (LONG, SEEDED))  # all but the last block is in the prefix cache
    assert in_steps == at_once
    assert tokens(llm, (LONG, OTHER)) != at_once


def test_requests_beside_it_keep_their_seeds(llm: LLM) -> None:
    """Short requests sample in the steps in which nothing is sampled for the long one."""
    short, other = LONG[3:40], [token + 1 for token in LONG]
    alone = tokens(llm, (short, SEEDED))
    together = tokens(llm, (other, SEEDED), (short, SEEDED), (LONG[9:50], OTHER))
    assert together[1:2] == alone
    assert tokens(llm, (other, SEEDED)) == together[:1]


def test_choreographed_calls_take_seeds(llm: LLM) -> None:
    with Choreography(llm) as c:
        parent = c.prefill(LONG[:40])
        first, second = (
            c.decode(LONG, parents=[parent], sampling_params=SEEDED).token_ids for _ in range(2)
        )
        other = c.decode(LONG, parents=[parent], sampling_params=OTHER).token_ids
    assert first == second != other

# SPDX-License-Identifier: Apache-2.0
"""Choreography in bfloat16, against the float32 oracle on the same (rounded) weights.

The tolerance is derived from ordinary requests, because the engine's own rounding is not ours to
judge: `noise` is the largest difference in log-probability between vLLM in bfloat16 and the
oracle on plain text of the same lengths. A choreographed call adds one source of error to those
of an ordinary request: a rotation between stored keys and queries, whose result is rounded once
more, when each of the two was already rounded once after a rotation of its own. One more rounding
beside two equal and independent ones adds at most a factor sqrt(3/2) to one call's error, and a
parent's own error enters the calls that read it; with chains of up to three calls that is less
than a factor of sqrt(3/2) * sqrt(3), about 2.1, rounded up to 2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import Draw, check, draw_choreography
from tests.engine.oracle import Oracle, whole
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.testing.laws import largest

_NOISE_FACTOR = 2.5
_LENGTHS = (1, 20, 33, 64, 90, 130, 200, 260)


def _rounded_oracle(path: Path) -> Oracle:
    """The float32 oracle on weights rounded to bfloat16."""
    oracle = Oracle(path)
    for parameter in oracle.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return oracle


def _measure_noise(llm: Any, oracle: Oracle) -> float:
    """Largest difference in log-probability on ordinary requests."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 511, (length,), generator=generator).tolist() for length in _LENGTHS * 3
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    worst = 0.0
    for prompt, output in zip(prompts, llm.generate(inputs, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        rows = oracle.plain_logits([*prompt, *completion.token_ids]).log_softmax(-1)
        for row, reported in zip(rows[len(prompt) - 1 : -1], completion.logprobs, strict=True):
            for token_id, entry in reported.items():
                worst = largest([worst, abs(float(row[token_id]) - entry.logprob)])
    return worst


@pytest.fixture(scope="module", params=sampled(["gemma3", "bloom", "llama", "qwen3"], 2))
def subject(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
) -> tuple[Any, Oracle, float]:
    """Engine in bfloat16, oracle, and the tolerance derived for the two."""
    path = tiny_model_path(request.param)
    llm, oracle = engine_slot(path, dtype="bfloat16"), _rounded_oracle(path)
    return llm, oracle, _NOISE_FACTOR * _measure_noise(llm, oracle)


def test_tolerance_tells_right_from_wrong(subject: tuple[Any, Oracle, float]) -> None:
    _, oracle, tolerance = subject
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 511, (50,), generator=generator).tolist()
    parent = oracle.encode(tokens[:40])
    right = oracle.encode(tokens[40:], [whole(parent, 0)], 40)
    for offset, new_offset in ((1, 40), (0, 41), (0, 42)):
        wrong = oracle.encode(tokens[40:], [whole(parent, offset)], new_offset)
        assert float((right.logprobs() - wrong.logprobs()).abs().max()) > tolerance


@pytest.mark.parametrize("seed", sampled(range(2000, 2006), 3))
def test_random_choreographies(subject: tuple[Any, Oracle, float], seed: int) -> None:
    llm, oracle, tolerance = subject
    draw = Draw(num_batches=2)  # with the last batch: chains of at most three calls
    with Choreography(llm) as choreography:
        # Two tokens may both be off by the tolerance, in opposite directions.
        check(
            choreography, oracle, draw_choreography(seed, draw), tolerance, tie_margin=2 * tolerance
        )

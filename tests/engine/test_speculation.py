# SPDX-License-Identifier: Apache-2.0
"""Speculation by n-grams: drafted tokens read their context like others, and change no answer."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

import vllm_choreo
from tests.engine.choreographies import check, draw_choreography
from tests.engine.oracle import Oracle, assert_greedy, random_tokens, whole
from tests.grids import sampled
from vllm_choreo import Choreography

# One repeated token is enough for a draft: most are wrong, some are right.
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), speculative_config=NGRAMS, disable_log_stats=False)


@pytest.fixture
def oracle(tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle("llama")


def _num_drafted(llm: Any) -> tuple[int, int]:
    """Drafted tokens, and those of them that were right, since the engine started."""
    names = [f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")]
    values = {metric.name: metric for metric in llm.get_metrics() if metric.name in names}
    drafted, accepted = (values[name].value for name in names)
    return drafted, accepted


@pytest.mark.parametrize("seed", sampled(range(2000, 2012), 2))
def test_random_choreographies(llm: Any, oracle: Oracle, seed: int) -> None:
    with Choreography(llm) as choreography:
        check(choreography, oracle, draw_choreography(seed))


def test_drafts_are_taken_and_left(llm: Any, oracle: Oracle) -> None:
    """Answers of many tokens, over parents, whose drafts are now right and now wrong."""
    before = _num_drafted(llm)
    rng = random.Random(3)
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    with Choreography(llm) as c:
        docs = [c.prefill(random_tokens(rng, n)) for n in (40, 70, 33)]
        calls = [{"header": random_tokens(rng, 5), "parents": [doc, docs[0]]} for doc in docs]
        answers = c.decode(calls, sampling_params=params)
        encoded = [oracle.encode(doc.token_ids) for doc in docs]
        for answer, doc in zip(answers, encoded, strict=True):
            parents = [whole(doc, 0), whole(encoded[0], len(doc))]
            assert_greedy(answer, oracle, parents, len(doc) + len(encoded[0]))
    drafted, accepted = (b - a for a, b in zip(before, _num_drafted(llm), strict=True))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.float64], ids=str)
def test_tokens_have_what_their_request_samples_by(dtype: torch.dtype) -> None:
    """On CPU, vLLM's left temperatures of a mixed batch as they lay in memory."""
    vllm_choreo.register()
    current_platform.register_triton_kernel_overrides()  # as every engine does when it starts
    values = torch.tensor([0, 7, 3], dtype=dtype)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    output = torch.full((5,), -9, dtype=dtype)  # what lay there
    expand = rejection_sampler.expand_kernel[(3,)]
    expand(output, values, ends, 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [1, 1, 3, 3, 3]


_SECOND_ENGINE = """
import vllm_choreo
vllm_choreo.register()
from vllm.platforms import current_platform
current_platform.register_triton_kernel_overrides()  # as every engine does when it starts
import vllm.v1.spec_decode.ngram_proposer
current_platform.register_triton_kernel_overrides()
"""


@pytest.mark.exhaustive  # a process of its own, with two engines
def test_a_second_engine_may_start_after_one_that_looked_up_ngrams() -> None:
    """That one imports numba, over whose objects vLLM's search for kernels stumbles."""
    done = subprocess.run([sys.executable, "-c", _SECOND_ENGINE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

# SPDX-License-Identifier: Apache-2.0
"""`n` answers of a call in a list: each is a message, and they are those that vLLM samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.oracle import Oracle, random_tokens
from vllm_choreo import Choreography
from vllm_choreo.errors import UnsupportedOptionError


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


def test_each_is_a_message_and_as_vllm_samples_it(
    llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    rng = random.Random(1)
    prompt, document = random_tokens(rng, 40), random_tokens(rng, 50)
    params = SamplingParams(n=3, seed=7, max_tokens=8, temperature=1.0, ignore_eos=True)
    (ordinary,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    with Choreography(llm) as c:
        message = c.prefill(document)
        calls = [
            {"header": prompt, "save_as": "answer"},
            {"header": prompt, "parents": [message], "sampling_params": params.clone()},
            {"header": prompt, "sampling_params": SamplingParams(max_tokens=1)},
        ]
        answers = c.decode(calls, sampling_params=params)
        assert len(answers) == 3 + 3 + 1
        expected = [list(output.token_ids) for output in ordinary.outputs]
        assert [list(a.generated_token_ids) for a in answers[:3]] == expected
        assert len({a.generated_token_ids for a in answers[3:6]}) == 3
        assert params.n == 3  # the caller's are as they were
        names = [a.id.partition("/")[2] for a in answers[:3]]
        assert names == ["answer.0", "answer.1", "answer.2"]
        greedy = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
        reader = c.decode([5, 6], parents=["answer.2"], sampling_params=greedy)
        oracle = tiny_oracle("llama")
        rows = oracle.plain_logits([*answers[2].token_ids, 5, 6]).log_softmax(-1)
        assert reader.logprobs is not None
        ((token, entry),) = reader.logprobs[0].items()
        assert abs(float(rows[-1][token]) - entry.logprob) < 1e-4


def test_a_call_that_is_no_list_makes_one(llm: Any) -> None:
    with Choreography(llm) as c, pytest.raises(UnsupportedOptionError, match="list of calls"):
        c.decode([5, 6], sampling_params=SamplingParams(n=2))

# SPDX-License-Identifier: Apache-2.0
"""`prompt_logprobs` of a call: those of its own tokens, and nothing of its parents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.oracle import Encoded, Oracle, random_tokens, whole
from vllm_choreo import Choreography

# Chunks of 48 tokens, and a pool that six answers outgrow.
TIGHT = {"num_gpu_blocks_override": 21, "max_model_len": 640, "max_num_batched_tokens": 48}


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Iterator[Any]:
    return engine_slot(tiny_model_path("llama"), **TIGHT)


@pytest.fixture
def oracle(tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle("llama")


def _check(reported: Any, header: Sequence[int], encoded: Encoded, num_likeliest: int) -> None:
    rows = encoded.logprobs()
    assert len(reported) == len(header) and reported[0] is None
    for index, entries in enumerate(reported[1:], 1):
        row = rows[index - 1]
        likeliest = row.topk(num_likeliest).indices.tolist()
        assert {header[index], *likeliest} == set(entries)
        for token, entry in entries.items():
            assert abs(entry.logprob - float(row[token])) < LOGPROB_TOLERANCE


def _params(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options)


def test_of_chunked_and_preempted_calls(llm: Any, oracle: Oracle) -> None:
    rng = random.Random(1)
    tokens = random_tokens(rng, 70)
    document = oracle.encode(tokens)
    headers = [random_tokens(rng, n) for n in (1, 2, 31, 64, 75, 90)]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.num_computed_tokens),
        preempt(request, *a, **k),
    )
    with Choreography(llm) as c:
        message = c.prefill(tokens)
        calls = [
            {"header": header, "parents": [message], "offsets": [5 * n], "new_offset": 80 + 5 * n}
            for n, header in enumerate(headers)
        ]
        answers = c.decode(calls, sampling_params=_params(60, prompt_logprobs=2))
        del scheduler._preempt_request
        assert preempted
        for number, (answer, header) in enumerate(zip(answers, headers, strict=True)):
            parents = [whole(document, 5 * number)]
            encoded = oracle.encode(answer.token_ids, parents, 80 + 5 * number)
            _check(answer.prompt_logprobs, header, encoded, 2)


def test_without_parents_they_are_those_of_an_ordinary_request(llm: Any) -> None:
    header = random_tokens(random.Random(2), 60)
    params = _params(2, prompt_logprobs=1)
    (ordinary,) = llm.generate([{"prompt_token_ids": header}], params, use_tqdm=False)
    with Choreography(llm) as c:
        found = c.decode(header, sampling_params=params).prompt_logprobs
    assert found is not None and found[0] is None and ordinary.prompt_logprobs[0] is None
    for ours, theirs in zip(found[1:], ordinary.prompt_logprobs[1:], strict=True):
        assert {t: e.rank for t, e in ours.items()} == {t: e.rank for t, e in theirs.items()}


def test_a_duplicate_is_run_where_they_are_asked_for(llm: Any, oracle: Oracle) -> None:
    """Else its tokens would be there already, and how likely they were would not be known."""
    tokens = random_tokens(random.Random(3), 100)
    call = {"kind": "prefill", "session": "raw", "parents": []}
    params = _params(1, prompt_logprobs=0)
    for name in ("one", "two"):
        params.extra_args = {"choreo": {**call, "save_as": name}}
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        _check(output.prompt_logprobs, tokens, oracle.encode(tokens), 0)


def test_baseline_calls_have_them_of_their_own_tokens(llm: Any) -> None:
    rng = random.Random(4)
    with Choreography(llm, mode="baseline") as c:
        message = c.prefill(random_tokens(rng, 40))
        header = random_tokens(rng, 9)
        params = _params(1, prompt_logprobs=1)
        found = c.decode(header, parents=[message], sampling_params=params).prompt_logprobs
    assert found is not None and len(found) == 9 and found[0] is None
    assert all(t in entries for t, entries in zip(header[1:], found[1:], strict=True) if entries)

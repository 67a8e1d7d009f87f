# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers: they draft for ordinary requests, and calls beside them change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography
from tests.engine.conftest import start_engine, stop_engine
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from vllm_choreo import Choreography
from vllm_choreo.engine.speculation import check_speculation
from vllm_choreo.errors import UnsupportedOptionError

NUM_DRAFTED = 3


class Subject(NamedTuple):
    llm: Any
    oracle: Oracle


# A model that drafts for itself is always right: a draft that is not shows a drafter that has read
# or written at wrong places.
@pytest.fixture(scope="module", params=["llama", "ministral3"])
def subject(
    request: pytest.FixtureRequest,
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> Iterator[Subject]:
    path = tiny_model_path(request.param)
    drafter = {
        "method": "draft_model",
        "model": str(path),
        "num_speculative_tokens": NUM_DRAFTED,
    }
    options = {"num_gpu_blocks_override": 66}
    llm = start_engine(path, speculative_config=drafter, disable_log_stats=False, **options)
    yield Subject(llm, tiny_oracle(request.param))
    stop_engine(llm)


def _num_drafted(llm: Any) -> tuple[int, int]:
    """Drafted tokens, and those of them that were right, since the engine started."""
    names = [f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")]
    values = {metric.name: metric for metric in llm.get_metrics() if metric.name in names}
    drafted, accepted = (values[name].value for name in names)
    return drafted, accepted


def _totals(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.store.totals


def _assert_ordinary(oracle: Oracle, prompt: Sequence[int], generated: Sequence[int]) -> None:
    message = SimpleNamespace(
        num_tokens=len(prompt) + len(generated),
        token_ids=[*prompt, *generated],
        generated_token_ids=generated,
    )
    assert_greedy(message, oracle, [], 0)


def test_random_choreographies(subject: Subject) -> None:
    for seed in range(3000, 3003):
        with Choreography(subject.llm) as choreography:
            check(choreography, subject.oracle, draw_choreography(seed))


def test_ordinary_requests_speculate_beside_calls(subject: Subject) -> None:
    """Every draft of theirs is right, and calls, in the same steps, take none."""
    llm, oracle = subject
    rng = random.Random(5)
    documents = [random_tokens(rng, n) for n in (70, 41)]
    encoded = [oracle.encode(tokens) for tokens in documents]
    greedy = SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)
    before = _num_drafted(llm)
    with Choreography(llm) as c:
        names = [c.prefill(tokens).id for tokens in documents]
        prompts, params, reads = [], [], []
        for number in range(8):
            prompts.append(random_tokens(rng, 30 + 17 * number))
            params.append(greedy)
            if number % 2:
                offset = rng.choice([0, 300, 700])  # placed, or virtual indices that are far off
                call = {"session": c.session, "kind": "decode", "parents": names}
                call |= {"offsets": [offset, offset + 90], "new_offset": offset + 140}
                params[-1] = greedy.clone()
                params[-1].extra_args = {"choreo": call}
                reads.append((number, offset))
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
            _assert_ordinary(oracle, prompt, output.outputs[0].token_ids)
        for number, offset in reads:
            generated = outputs[number].outputs[0].token_ids
            parents = [whole(encoded[0], offset), whole(encoded[1], offset + 90)]
            _assert_call(oracle, [*prompts[number], *generated], len(generated), parents, offset)
    drafted, accepted = (b - a for a, b in zip(before, _num_drafted(llm), strict=True))
    assert drafted == accepted > 4 * 15
    assert not _totals(llm)["drafted_tokens"]


def _assert_call(
    oracle: Oracle, tokens: Sequence[int], num_new: int, parents: list[Parent], offset: int
) -> None:
    message = SimpleNamespace(
        num_tokens=len(tokens), token_ids=tokens, generated_token_ids=tokens[-num_new:]
    )
    assert_greedy(message, oracle, parents, offset + 140)


@pytest.mark.parametrize(
    ("method", "v2", "asynchronous", "named"),
    [
        ("medusa", False, False, "speculative_config.method"),
        ("draft_model", True, False, "VLLM_USE_V2_MODEL_RUNNER"),
        ("eagle", False, True, "async_scheduling"),
    ],
)
def test_what_cannot_draft_is_refused(
    method: str, v2: bool, asynchronous: bool, named: str
) -> None:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        use_v2_model_runner=v2,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    with pytest.raises(UnsupportedOptionError, match=named):
        check_speculation(config)
    config.use_v2_model_runner = config.scheduler_config.async_scheduling = False
    config.speculative_config.method = "draft_model"
    check_speculation(config)

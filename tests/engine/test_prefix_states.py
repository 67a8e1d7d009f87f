# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefix cache for ordinary requests in models with states, beside calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.feature_machine import invariants
from tests.engine.hybrid import MODELS, scheduler_of, small_engine
from tests.engine.text_oracle import TextOracle
from tests.grids import sampled
from vllm_choreo import Choreography

BLOCK = 32
# States of ordinary requests lie 64 tokens apart: four times those of a state.
CHOREO = {"tokens_per_state": 16}
Tokens = list[int]


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> TextOracle:
    return TextOracle(tiny_model_path(name))


@pytest.fixture
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    made = engine_slot(tiny_model_path(name), additional_config={"choreo": CHOREO})
    assert made.reset_prefix_cache()
    return made


def _tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return [rng.randrange(3, 511) for _ in range(num_tokens)]


def _generate(
    llm: Any, oracle: TextOracle, texts: Sequence[Tokens], max_tokens: int = 4
) -> tuple[list[int], list[Tokens]]:
    """Answer texts, together; return how many tokens of each were found, and the answers."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3, detokenize=False
    )
    prompts = [{"prompt_token_ids": text} for text in texts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        _check(oracle, text, output.outputs[0])
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return [output.num_cached_tokens for output in outputs], answers


def _check(oracle: TextOracle, text: Tokens, answer: Any) -> None:
    rows = oracle.logprobs([*text, *answer.token_ids])[len(text) - 1 :]
    for row, token, entries in zip(rows, answer.token_ids, answer.logprobs, strict=False):
        assert float(row[token]) > float(row.max()) - TIE_MARGIN
        for other, entry in entries.items():
            assert abs(entry.logprob - float(row[other])) < LOGPROB_TOLERANCE


def test_where_prompts_part_a_state_is_left(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(1)
    shared = _tokens(rng, 50)
    for num_found in (0, 0, 32, 32):
        assert _generate(llm, oracle, [[*shared, *_tokens(rng, 9)]])[0] == [num_found]
    # The same prompt: its last token is always run.
    again = [*shared, *_tokens(rng, 14)]
    for num_found in (32, 32):
        assert _generate(llm, oracle, [again])[0] == [num_found]


def test_states_are_left_at_even_distances(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(2)
    shared = _tokens(rng, 150)
    for num_found in (0, 128, 128):
        assert _generate(llm, oracle, [[*shared, *_tokens(rng, 9)]])[0] == [num_found]
    # What is generated, too.
    text = _tokens(rng, 60)
    _, (answer,) = _generate(llm, oracle, [text], max_tokens=80)
    assert _generate(llm, oracle, [[*text, *answer, 7]])[0] == [128]


def test_a_conversation_runs_each_turn_twice_at_most(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(3)
    text: Tokens = []
    ends = [0]
    for _ in range(5):
        text = [*text, *_tokens(rng, 40)]
        (num_found,), (answer,) = _generate(llm, oracle, [text], max_tokens=6)
        text += answer
        ends.append(len(text))
        if len(ends) > 3:  # the end of the turn before the last one
            assert num_found >= (ends[-3] - 1) // BLOCK * BLOCK


def test_prompts_of_one_batch_find_what_the_first_has_left(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(4)
    shared = _tokens(rng, 140)
    texts = [[*shared, *_tokens(rng, 9)] for _ in range(6)]
    # The second waits for what the first leaves, the third for what the second leaves at its end.
    assert _generate(llm, oracle, texts)[0] == [0, 128, 128, 128, 128, 128]
    assert _generate(llm, oracle, texts)[0] == [128] * 6


def test_no_prompt_finds_anothers_salt(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(5)
    shared, params = _tokens(rng, 150), SamplingParams(temperature=0.0, max_tokens=1)
    found = [
        llm.generate(
            {"prompt_token_ids": [*shared, 5], "cache_salt": salt}, params, use_tqdm=False
        )[0].num_cached_tokens
        for salt in ("a", "b", "a", "b")
    ]
    assert found == [0, 0, 128, 128]


def test_a_reset_forgets_states(llm: Any, oracle: TextOracle) -> None:
    text = _tokens(random.Random(6), 150)
    assert [_generate(llm, oracle, [text])[0] for _ in range(2)] == [[0], [128]]
    assert llm.reset_prefix_cache()
    assert _generate(llm, oracle, [text])[0] == [0]
    invariants.check_nothing_is_left(scheduler_of(llm))


@pytest.fixture(params=sampled(["async", "composed", ""], 1))
def small(
    request: pytest.FixtureRequest,
    name: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
) -> Any:
    """Engine of 24 blocks and 5 states, in which prompts run in parts of 48 tokens."""
    choreo = {"tokens_per_state": 130, "composed_states": request.param == "composed"}
    return small_engine(
        *(engine_slot, tiny_model_path(name), choreo),
        is_async=request.param == "async",
        max_num_batched_tokens=48,
    )


_SEEDS = [range(3), *(range(first, first + 5) for first in range(3, 23, 5))]


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_prompts_with_little_room(small: Any, oracle: TextOracle, seeds: range) -> None:
    """Prompts go on behind prompts and answers, beside calls; states are taken and given up."""
    num_found = 0
    for seed in seeds:
        rng = random.Random(seed)
        texts: list[Tokens] = [[]]
        with Choreography(small) as c:
            made = []
            for _ in range(8):
                if rng.random() < 0.3:
                    made.append(c.prefill(_tokens(rng, rng.choice((3, 40)))))
                begun = rng.choices([*texts, *texts[-2:]], k=rng.choice((1, 1, 2, 4)))
                prompts = [
                    [*text[: rng.choice((len(text), 70))], *_tokens(rng, rng.choice((2, 20, 60)))]
                    for text in begun
                ]
                prompts = [prompt for prompt in prompts if len(prompt) < 20 * BLOCK]
                found, answers = _generate(small, oracle, prompts, rng.choice((1, 5, 40)))
                num_found += sum(found)
                texts += [[*p, *answer] for p, answer in zip(prompts, answers, strict=True)]
                invariants.check(scheduler_of(small))
            for message in made:
                header = _tokens(rng, 4)
                params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
                answer = c.decode(header, parents=[message], sampling_params=params)
                oracle.check([*message.token_ids, *header], answer)
        invariants.check_nothing_is_left(scheduler_of(small))
    assert num_found

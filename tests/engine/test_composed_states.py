# SPDX-License-Identifier: Apache-2.0
"""Models with states that read messages in any order, against the oracle that composes states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.choreographies import Draw, check, draw_choreography, side_by_side
from tests.engine.feature_machine import invariants
from tests.engine.oracle import random_tokens, whole
from tests.engine.state_oracle import StateOracle
from tests.engine.test_states import OPTIONS, _greedy
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.models.tiny import make_tiny_model

MODELS = ["granite_hybrid", "lfm2"]
_DRAW = Draw(has_parts=False)


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> StateOracle:
    return StateOracle(tiny_model_path(name))


@pytest.fixture
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    choreo = {"composed_states": True, "tokens_per_state": 128}
    options = {**OPTIONS.get(name, {}), "additional_config": {"choreo": choreo}}
    return engine_slot(tiny_model_path(name), **options)


@pytest.mark.parametrize("seeds", sampled([range(3), *(range(a, a + 10) for a in range(3, 103, 10))], 1), ids=str)
def test_random_choreographies(llm: Any, oracle: StateOracle, seeds: range) -> None:
    """Any order, duplicates, gaps and negative distances, behind generated messages, too."""
    with Choreography(llm) as choreography:
        drawn = [draw_choreography(seed, _DRAW) for seed in seeds]
        check(choreography, oracle, side_by_side(drawn))


# -- in bfloat16 -------------------------------------------------------------------------------


def _squares(rows: torch.Tensor, tokens: Any, logprobs: Any) -> list[float]:
    """Squares of the differences of reported log-probabilities; rows begin with the first."""
    return [
        (entry.logprob - float(row[token])) ** 2
        for row, _, entries in zip(rows, tokens, logprobs, strict=False)
        for token, entry in entries.items()
    ]


@pytest.mark.exhaustive
def test_delta_rule_is_as_near_to_float32_as_ordinary_requests(
    engine_slot: Callable[..., Any], tmp_path: Path
) -> None:
    """vLLM runs gated delta rules on CPU in bfloat16 alone, so both are judged by one float32."""
    path = make_tiny_model("qwen3_next", tmp_path, dtype=torch.bfloat16)
    choreo = {"composed_states": True, "tokens_per_state": 128}
    llm = engine_slot(path, dtype="bfloat16", additional_config={"choreo": choreo})
    oracle, rng = StateOracle(path), random.Random(0)
    composed: list[float] = []
    ordinary: list[float] = []
    with Choreography(llm) as c:
        for _ in range(24):
            made: list[Message] = []
            encoded: list[Any] = []
            for index in range(5):
                read = rng.sample(range(index), min(index, rng.choice((0, 1, 2))))
                at, tokens = rng.randrange(200), random_tokens(rng, rng.choice((1, 7, 33, 90)))
                places = {"offsets": [rng.randrange(200) for _ in read], "new_offset": at}
                parents = [made[number] for number in read]
                if index == 4 or rng.random() < 0.3:
                    made.append(
                        c.decode(tokens, parents=parents, sampling_params=_greedy(6), **places)
                    )
                else:
                    made.append(c.prefill(tokens, parents=parents, **places))
                seen = [
                    whole(encoded[number], offset)
                    for number, offset in zip(read, places["offsets"], strict=True)
                ]
                encoded.append(oracle.encode(made[-1].token_ids, seen, at))
            header = random_tokens(rng, 3)
            answer = c.decode(header, parents=made[::-1], sampling_params=_greedy(6))
            offset, seen = 0, []
            for one in encoded[::-1]:
                seen.append(whole(one, offset))
                offset += len(one)
            rows = oracle.encode(answer.token_ids, seen, offset).logprobs()[len(header) - 1 :]
            composed += _squares(rows, answer.generated_token_ids, answer.logprobs)
            text = [*(token for one in made[::-1] for token in one.token_ids), *header]
            (output,) = llm.generate([{"prompt_token_ids": text}], _greedy(6), use_tqdm=False)
            said = output.outputs[0]
            rows = oracle.plain_logits([*text, *said.token_ids]).log_softmax(-1)[len(text) - 1 :]
            ordinary += _squares(rows, said.token_ids, said.logprobs)
    far = (sum(composed) / len(composed)) ** 0.5 / (sum(ordinary) / len(ordinary)) ** 0.5
    assert far < 1.15, far

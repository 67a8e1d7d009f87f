# SPDX-License-Identifier: Apache-2.0
"""A real model with windows (512 tokens in 15 of 18 layers), against the dense oracle.

Collected only where `vllm-choreo model --name gemma3-270m` has made the folder (see conftest.py):
who makes it accepts Gemma's terms of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    TIE_MARGIN,
    Draw,
    check,
    check_tokens,
    draw_choreography,
)
from tests.engine.oracle import Encoded, Oracle, Parent, whole
from vllm_choreo import Choreography
from vllm_choreo.testing.models.embedded import embedded_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # two minutes of one core

_GREEDY = SamplingParams(temperature=0.0, max_tokens=10, logprobs=5)
_DRAW = Draw(num_batches=2, max_tokens=3, max_length=40, token_ids=(300, 200_000))
_FACTS = "".join(
    f"House {n} has {3 * n % 17} windows and a {c} door.\n"
    for n, c in enumerate(("red", "green", "blue", "white", "black") * 9)
)


@pytest.fixture(scope="module")
def gemma(engine_slot: Callable[..., Any]) -> tuple[Any, Oracle]:
    """Engine and oracle."""
    path = embedded_model(progress=False, name="gemma3-270m")
    return engine_slot(path), Oracle(path)


def _encode(oracle: Oracle, message: Any, parents: list[Parent]) -> Encoded:
    """The oracle's encoding of the engine's tokens; of the logits what generated tokens need."""
    encoded = oracle.encode(message.token_ids, parents, message.position)
    num_header = message.num_tokens - len(message.generated_token_ids)
    if message.generated_token_ids:
        check_tokens(message, encoded, num_header, LOGPROB_TOLERANCE, TIE_MARGIN)
    # A row is a megabyte.
    return replace(encoded, logits=encoded.logits[:0])


def _behind(encodings: list[Encoded]) -> list[Parent]:
    parents, end = [], 0
    for encoded in encodings:
        parents.append(whole(encoded, end))
        end += len(encoded)
    return parents


def test_a_debate(gemma: tuple[Any, Oracle]) -> None:
    """Three agents, three rounds, about a text longer than the window."""
    llm, oracle = gemma
    with Choreography(llm) as c:
        question = c.prefill(f"<bos>{_FACTS}Question: which house has a green door?\n")
        assert question.num_tokens > 512 + 40
        known = {question.id: _encode(oracle, question, [])}
        roles = c.prefill([{"tokens": f"{name} answers.\n"} for name in ("Anna", "Bela", "Cleo")])
        known |= {role.id: _encode(oracle, role, []) for role in roles}
        answers: list[Any] = []
        for _ in range(3):
            calls = []
            for number, role in enumerate(roles):
                others = [answer for n, answer in enumerate(answers) if n != number]
                calls.append({"header": "Answer: House", "parents": [question, role, *others]})
            answers = c.decode(calls, sampling_params=_GREEDY)
            encoded = {
                answer.id: _encode(
                    oracle, answer, _behind([known[parent.id] for parent in call["parents"]])
                )
                for answer, call in zip(answers, calls, strict=True)
            }
            known |= encoded


def test_a_text_seen_around_the_window(gemma: tuple[Any, Oracle]) -> None:
    """One text at two places, its parts, and to the right of who reads it."""
    llm, oracle = gemma
    with Choreography(llm) as c:
        text = c.prefill(f"<bos>{_FACTS}")
        encoded, n = _encode(oracle, text, []), text.num_tokens
        for parents, offsets, new_offset in (
            ([(0, n)], [0], n + 400),
            ([(0, n)], [1000], 1100),
            ([(0, n), (0, n)], [2 * n, 0], 2 * n + 500),
            ([(n - 100, n), (0, 50)], [0, 700], 600),
        ):
            message = c.decode(
                "The house",
                parents=[(text, *span) for span in parents],
                offsets=offsets,
                new_offset=new_offset,
                sampling_params=_GREEDY,
            )
            spans = zip(offsets, parents, strict=True)
            _encode(oracle, message, [Parent(encoded, offset, *span) for offset, span in spans])


@pytest.mark.parametrize("seed", range(5000, 5003))
def test_random_choreographies(gemma: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = gemma
    with Choreography(llm) as c:
        check(c, oracle, draw_choreography(seed, _DRAW))

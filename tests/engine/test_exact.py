# SPDX-License-Identifier: Apache-2.0
"""Exact mode against ordinary requests on the concatenated text, on random programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from vllm_choreo import Choreography
from vllm_choreo.message import Message

NUM_PROGRAMS = 12
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["llama", "bloom"])
def llm(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
) -> Any:
    return engine_slot(tiny_model_path(request.param))


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm, mode="exact") as session:
        yield session


def _greedy(max_tokens: int = MAX_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **options
    )


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 511) for _ in range(num_tokens)]


def _span(parent: Any) -> tuple[int, ...]:
    message, start, stop = parent if isinstance(parent, tuple) else (parent, None, None)
    return message.token_ids[start:stop]


def _text(call: dict[str, Any]) -> list[int]:
    """The concatenation that a call stands for."""
    return [*(t for parent in call["parents"] for t in _span(parent)), *call["header"]]


def assert_equals_requests(
    llm: Any, texts: Sequence[Sequence[int]], messages: Sequence[Message]
) -> None:
    """Each message is what an ordinary request on its text gives: tokens and logprobs.

    The text is continued with the message's own tokens, so that one choice between two tokens as
    good as equal does not end the comparison.
    """
    prompts, wanted = [], []
    for text, message in zip(texts, messages, strict=True):
        for i in range(len(message.generated_token_ids)):
            prompts.append({"prompt_token_ids": [*text, *message.generated_token_ids[:i]]})
            wanted.append((message.generated_token_ids[i], message.logprobs[i]))
    outputs = llm.generate(prompts, _greedy(1), use_tqdm=False)
    for (token, logprobs), output in zip(wanted, outputs, strict=True):
        (plain,) = output.outputs[0].logprobs
        best = max(entry.logprob for entry in plain.values())
        if token not in plain or plain[token].logprob < best - TIE_MARGIN:
            pytest.fail(f"sampled {token}, an ordinary request {output.outputs[0].token_ids}")
        for token_id in plain.keys() & logprobs.keys():
            difference = abs(plain[token_id].logprob - logprobs[token_id].logprob)
            assert difference < LOGPROB_TOLERANCE


@dataclass
class Program:
    """A random program: prefills and decodes with random parents, single and in parallel."""

    rng: random.Random
    modes: tuple[str, ...]
    made: list[Message] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)

    def parents(self) -> list[Any]:
        count = min(self.rng.choice((0, 1, 2, 3, 4, 5)), len(self.made))
        named = self.rng.sample(self.made, count)
        if self.answers and self.rng.random() < 0.5:
            # Go on after an earlier call: what it read, and what it said.
            index = self.rng.randrange(len(self.answers))
            named = [*self.calls[index]["parents"], self.answers[index], *named[:1]]
        return [self.part(message) if self.rng.random() < 0.2 else message for message in named]

    def part(self, message: Any) -> Any:
        if isinstance(message, tuple):
            return message
        start = self.rng.choice((0, self.rng.randrange(message.num_tokens)))
        return message, start, self.rng.randrange(start + 1, message.num_tokens + 1)

    def step(self, c: Choreography) -> None:
        count = self.rng.choice((1, 1, 2, 3))
        calls = [
            {"header": _tokens(self.rng, self.rng.choice((1, 5, 20, 32, 40))), "mode": mode}
            for mode in self.rng.choices(self.modes, k=count)
        ]
        for call in calls:
            call["parents"] = self.parents()
        if self.rng.random() < 0.35:
            items = [{"tokens": call.pop("header"), **call} for call in calls]
            self.made += c.prefill(items)
            return
        answers = c.decode(calls, sampling_params=_greedy(self.rng.randrange(1, MAX_TOKENS)))
        self.calls += calls
        self.answers += answers
        self.made += answers
        if self.rng.random() < 0.2:
            c.evict(self.rng.choice(self.made))


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_random_programs_give_what_ordinary_requests_give(llm: Any, c: Any, seed: int) -> None:
    program = Program(random.Random(seed), ("exact",))
    for _ in range(6):
        program.step(c)
    assert all(message.usage.exact for message in program.made)
    texts = [_text(call) for call in program.calls]
    for answer, text, call in zip(program.answers, texts, program.calls, strict=True):
        usage = answer.usage
        assert usage.reused_tokens + usage.encoded_tokens == len(text) + len(
            answer.generated_token_ids
        )
        assert answer.position == len(text) - len(call["header"])
    assert_equals_requests(llm, texts, program.answers)


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_call_that_is_called_exact_is(llm: Any, c: Any, seed: int) -> None:
    """In programs that mix both modes: `usage.exact` implies equality."""
    program = Program(random.Random(100 + seed), ("exact", "choreo"))
    for _ in range(7):
        program.step(c)
    exact = [i for i, answer in enumerate(program.answers) if answer.usage.exact]
    for call, answer in zip(program.calls, program.answers, strict=True):
        assert answer.usage.exact or call["mode"] == "choreo"
    texts = [_text(program.calls[i]) for i in exact]
    assert_equals_requests(llm, texts, [program.answers[i] for i in exact])

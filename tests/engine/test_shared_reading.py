# SPDX-License-Identifier: Apache-2.0
"""Calls of one batch that attend to the same messages read them together, and nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from vllm_choreo import Choreography
from vllm_choreo.engine.worker.span_batcher import SpanBatcher
from vllm_choreo.errors import ChoreoError

# RoPE with grouped heads, ALiBi, a partial rotary embedding, and windows with sinks.
MODELS = ["llama", "bloom", "glm4", "gpt_oss"]


def _batcher(llm: Any) -> SpanBatcher:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.batcher


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of groups of several readers, for each step that had spans to read."""
    seen: list[int] = []
    batch_of = SpanBatcher.batch

    def batch(self: SpanBatcher, *args: Any, **kwargs: Any) -> Any:
        plans = batch_of(self, *args, **kwargs)
        if plans is not None:
            plan = plans[0]
            seen.append(plan.reads.num_groups - plan.spans.num_reqs if plan.reads else 0)
        return plans

    monkeypatch.setattr(SpanBatcher, "batch", batch)
    yield seen


def _greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)


def _readers(rng: random.Random, messages: list[Any]) -> list[dict[str, Any]]:
    """Calls that read the messages in every order, at positions of their own, some in part."""
    calls = []
    for i in range(5):
        order = rng.sample(range(len(messages)), len(messages))
        parents: list[Any] = [messages[k] for k in order]
        if i == 3:
            parents[0] = (parents[0], 32, parents[0].num_tokens)
        if i == 4:
            parents.append(parents[0])  # twice, at two positions
        offsets = [rng.randrange(200) for _ in parents]
        calls.append(
            {
                "header": random_tokens(rng, 2 + 3 * i),
                "parents": parents,
                "offsets": offsets,
                "new_offset": 210 + i,
                "sampling_params": _greedy(),
            }
        )
    return calls


def _oracle_parents(call: dict[str, Any], encoded: dict[str, Any]) -> list[Parent]:
    parents = []
    for named, offset in zip(call["parents"], call["offsets"], strict=True):
        if isinstance(named, tuple):
            message, start, stop = named
            parents.append(Parent(encoded[message.id], offset, start, stop))
        else:
            parents.append(whole(encoded[named.id], offset))
    return parents


@pytest.mark.parametrize("model", MODELS)
def test_readers_in_one_batch_equal_the_oracle(
    model: str,
    groups: list[int],
    monkeypatch: pytest.MonkeyPatch,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> None:
    llm, oracle, rng = engine_slot(tiny_model_path(model)), tiny_oracle(model), random.Random(model)
    with Choreography(llm) as c:
        pieces = [random_tokens(rng, n) for n in (70, 41, 100)]
        messages = c.prefill([{"tokens": tokens} for tokens in pieces])
        encoded = {m.id: oracle.encode(m.token_ids) for m in messages}
        calls = _readers(rng, messages)
        groups.clear()
        monkeypatch.setattr(_batcher(llm), "min_saved_bytes", 0)
        answers = c.decode(calls)
        assert len(groups) >= 6 and min(groups[:-1]) > 0  # every step of the batch read together
        for call, answer in zip(calls, answers, strict=True):
            assert_greedy(answer, oracle, _oracle_parents(call, encoded), call["new_offset"])


def test_together_equals_each_alone(plain_llama: Any) -> None:
    llm, rng = plain_llama, random.Random(7)
    with Choreography(llm) as c:
        messages = c.prefill([{"tokens": random_tokens(rng, n)} for n in (70, 41, 100)])
        calls = _readers(rng, messages)
        together = c.decode(calls)
        _batcher(llm).shared_reading = False
        try:
            alone = c.decode(calls)
        finally:
            _batcher(llm).shared_reading = True
        for first, second in zip(together, alone, strict=True):
            assert first.generated_token_ids == second.generated_token_ids
            for left, right in zip(first.logprobs, second.logprobs, strict=True):
                for token in left.keys() & right.keys():
                    assert abs(left[token].logprob - right[token].logprob) < LOGPROB_TOLERANCE


def test_other_values_are_refused() -> None:
    from vllm_choreo.config import ChoreoConfig

    with pytest.raises(ChoreoError, match="shared_reading"):
        ChoreoConfig(shared_reading="yes")  # type: ignore[arg-type]

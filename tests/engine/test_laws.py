# SPDX-License-Identifier: Apache-2.0
"""The seven laws of choreography on the real engine in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.oracle import Oracle, Parent, whole
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.testing import laws
from vllm_choreo.testing.laws import LAWS, difference
from vllm_choreo.testing.laws import greedy as _greedy


@dataclass(frozen=True)
class Subject(laws.Subject):
    """The engine under test, with its oracle."""

    oracle: Oracle


@pytest.fixture(scope="module", params=sampled(["llama", "bloom", "deepseek_v3", "embedded"], 3))
def subject(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> Subject:
    """RoPE, ALiBi, MLA, and a real model in turn."""
    if request.param == "embedded":
        path = request.getfixturevalue("embedded_model_path")
        return Subject(engine_slot(path), 49000, Oracle(path))
    path = tiny_model_path(request.param)
    return Subject(engine_slot(path), 511, tiny_oracle(request.param))


def _assert_same(left: Any, right: Any) -> None:
    """Equal tokens and log-probabilities; `Message` or vLLM's `CompletionOutput`."""
    assert difference(left, right) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", LAWS)
def test_law(subject: Subject, name: str) -> None:
    measured = list(LAWS[name](subject))
    assert measured and max(measured) < LOGPROB_TOLERANCE, measured


@pytest.mark.parametrize("at", [1, 45])
def test_split_elsewhere(subject: Subject, at: int) -> None:
    (measured,) = laws.split(subject, at)
    assert measured < LOGPROB_TOLERANCE


def test_what_differs_is_seen(subject: Subject) -> None:
    """Another token, another log-probability, and other tokens among the best."""
    with Choreography(subject.llm) as c:
        answer = c.decode(subject.tokens(12, 5), sampling_params=_greedy())
    assert difference(answer, answer) == 0.0
    ids = answer.generated_token_ids
    other = replace(answer, generated_token_ids=(*ids[:-1], (ids[-1] + 1) % 500))
    assert difference(answer, other) == math.inf
    assert answer.logprobs is not None
    moved = [
        {t: replace(entry, logprob=entry.logprob - 0.25) for t, entry in entries.items()}
        for entries in answer.logprobs
    ]
    assert difference(answer, replace(answer, logprobs=moved)) == pytest.approx(0.25)
    strange = [{-t - 1: entry for t, entry in entries.items()} for entries in answer.logprobs]
    assert difference(answer, replace(answer, logprobs=strange)) == math.inf


def test_no_parents_equals_an_ordinary_request(subject: Subject) -> None:
    header = subject.tokens(45, 0)
    (ordinary,) = subject.ordinary([header])
    with Choreography(subject.llm) as c:
        message = c.decode(header, sampling_params=_greedy())
        _assert_same(message, ordinary)
        assert message.usage.exact
        encoded = subject.oracle.encode(message.token_ids)
        check_tokens(message, encoded, 45, LOGPROB_TOLERANCE, TIE_MARGIN)


def test_a_parent_without_an_offset_follows_the_one_before(subject: Subject) -> None:
    with Choreography(subject.llm) as c:
        a, b, d = c.prefill([{"tokens": subject.tokens(n, n)} for n in (40, 30, 20)])
        parents = [a, (b, 5, 30), d]
        call = {"header": subject.tokens(10, 3), "parents": parents, "sampling_params": _greedy()}
        for omitted, explicit in (
            ([None, None, 7], [0, 40, 7]),
            ([50, None, None], [50, 90, 115]),
            ([9, 3, None], [9, 3, 28]),
        ):
            left, right = c.decode([{**call, "offsets": omitted}, {**call, "offsets": explicit}])
            _assert_same(left, right)
            assert left.position == right.position == explicit[2] + 20
        exact = c.decode([{**call, "mode": "exact", "offsets": [None, 40, None]}])[0]
        assert exact.usage.exact and exact.position == 85


def test_choreographed_keys_stay_out_of_the_prefix_cache(subject: Subject) -> None:
    subject.llm.reset_prefix_cache()
    document, question = subject.tokens(64, 40), subject.tokens(64, 41)
    with Choreography(subject.llm) as c:
        parent = c.prefill(document)
        c.decode(question, parents=[parent], offsets=[500], sampling_params=_greedy())
        # Cached are the two blocks that the first of these requests has encoded itself.
        for prompt, num_cached in ((document, 0), (document + question, 64), (question, 0)):
            request = {"prompt_token_ids": [*prompt, 5]}
            (output,) = subject.llm.generate(request, _greedy(1), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            encoded = subject.oracle.plain_logits(request["prompt_token_ids"]).log_softmax(-1)
            for token_id, reported in output.outputs[0].logprobs[0].items():
                assert abs(float(encoded[-1, token_id]) - reported.logprob) < LOGPROB_TOLERANCE


def test_calls_that_wait_for_their_parents(subject: Subject) -> None:
    """Parents that are still being generated in the same batch: as if called one after another."""
    headers = [subject.tokens(length, length) for length in (30, 9, 14)]
    with Choreography(subject.llm) as c:
        first = c.decode(headers[0], sampling_params=_greedy())
        second = c.decode(headers[1], parents=[first], sampling_params=_greedy())
        third = c.decode(headers[2], parents=[second, first], sampling_params=_greedy())
        ids = [f"{c.session}/{name}" for name in ("one", "two", "three")]
        parents = ((), (ids[0],), (ids[1], ids[0]))
        params = [
            ChoreoParams(
                parents=tuple(map(ParentSpan, named)), save_as=name, session=c.session
            ).apply(_greedy())
            for name, named in zip(ids, parents, strict=True)
        ]
        inputs = [{"prompt_token_ids": header} for header in headers]
        outputs = subject.llm.generate(inputs, params, use_tqdm=False)
        for message, output in zip((first, second, third), outputs, strict=True):
            _assert_same(message, output.outputs[0])


def test_oracle(subject: Subject) -> None:
    """One message of everything: reorder, repeat, part, gap, overlap, a parent to the right."""
    oracle = subject.oracle
    tokens = [subject.tokens(length, 70 + length) for length in (33, 21, 11)]
    with Choreography(subject.llm) as c:
        a = c.prefill(tokens[0])
        b = c.decode(tokens[1], parents=[a], new_offset=90, sampling_params=_greedy())
        seen = [a, b, (a, 5, 30), b]
        offsets = [60, 0, 64, 400]
        answer = c.decode(
            tokens[2], parents=seen, offsets=offsets, new_offset=130, sampling_params=_greedy(6)
        )
        encoded_a = oracle.encode(tokens[0])
        encoded_b = oracle.decode(tokens[1], [whole(encoded_a, 0)], 90, num_tokens=4)
        assert encoded_b.token_ids == b.token_ids
        parents = [
            whole(encoded_a, 60),
            whole(encoded_b, 0),
            Parent(encoded_a, 64, 5, 30),
            whole(encoded_b, 400),
        ]
        expected = oracle.decode(tokens[2], parents, 130, num_tokens=6)
        assert expected.token_ids == answer.token_ids
        check_tokens(answer, expected, 11, LOGPROB_TOLERANCE, TIE_MARGIN)
        assert not answer.usage.exact

# SPDX-License-Identifier: Apache-2.0
"""The seven laws of choreography on the real engine in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.oracle import Oracle, Parent, whole
from vllm_choreo import Choreography
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams


@dataclass(frozen=True)
class Subject:
    """The engine under test, its oracle, and the size of its vocabulary."""

    llm: Any
    oracle: Oracle
    vocab_size: int

    def tokens(self, num_tokens: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(20, self.vocab_size, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["llama", "bloom", "deepseek_v3", "embedded"])
def subject(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> Subject:
    """RoPE, ALiBi, MLA, and a real model in turn."""
    if request.param == "embedded":
        path = request.getfixturevalue("embedded_model_path")
        return Subject(engine_slot(path), Oracle(path), 49000)
    path = tiny_model_path(request.param)
    return Subject(engine_slot(path), tiny_oracle(request.param), 511)


def _greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)


def _ordinary(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 4) -> list[Any]:
    """Plain vLLM requests on these tokens; returns their `CompletionOutput`s."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, _greedy(max_tokens), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def _assert_same(left: Any, right: Any) -> None:
    """Equal tokens and log-probabilities; `Message` or vLLM's `CompletionOutput`."""
    first, second = (
        tuple(x.generated_token_ids if isinstance(x, Message) else x.token_ids)
        for x in (left, right)
    )
    assert first == second
    for a, b in zip(left.logprobs, right.logprobs, strict=True):
        # The fifth and sixth best may change places; at least the four best are in both.
        common = a.keys() & b.keys()
        assert len(common) >= 4
        for token_id in common:
            assert abs(a[token_id].logprob - b[token_id].logprob) < LOGPROB_TOLERANCE


def test_no_parents_equals_an_ordinary_request(subject: Subject) -> None:
    header = subject.tokens(45, 0)
    (ordinary,) = _ordinary(subject.llm, [header])
    with Choreography(subject.llm) as c:
        message = c.decode(header, sampling_params=_greedy())
        _assert_same(message, ordinary)
        assert message.usage.exact
        encoded = subject.oracle.encode(message.token_ids)
        check_tokens(message, encoded, 45, LOGPROB_TOLERANCE, TIE_MARGIN)


def test_chain(subject: Subject) -> None:
    # The third message is decoded, so that the last one reads sampled tokens, the last included.
    lengths = (33, 7, 12, 20)
    pieces = [subject.tokens(length, seed) for seed, length in enumerate(lengths)]
    with Choreography(subject.llm) as c:
        first = c.prefill(pieces[0])
        second = c.prefill(pieces[1], parents=[first])
        third = c.decode(pieces[2], parents=[first, second], sampling_params=_greedy())
        last = c.decode(pieces[3], parents=[first, second, third], sampling_params=_greedy())
        assert all(message.usage.exact for message in (first, second, third, last))
        text = pieces[0] + pieces[1] + pieces[2]
        (ordinary,) = _ordinary(subject.llm, [text])
        _assert_same(third, ordinary)
        (ordinary,) = _ordinary(subject.llm, [text + list(ordinary.token_ids) + pieces[3]])
        _assert_same(last, ordinary)


def test_shift(subject: Subject) -> None:
    with Choreography(subject.llm) as c:
        first, second = c.prefill(
            [{"tokens": subject.tokens(40, 1)}, {"tokens": subject.tokens(30, 2), "new_offset": 9}]
        )
        here, there = c.decode(
            [
                {
                    "header": subject.tokens(10, 3),
                    "parents": [first, (second, 5, 30)],
                    "offsets": [25 + shift, 3 + shift],
                    "new_offset": 50 + shift,
                    "sampling_params": _greedy(),
                }
                for shift in (0, 613)
            ]
        )
        _assert_same(here, there)
        # What they wrote is the same too, wherever it was written.
        at = {"offsets": [0], "new_offset": 40, "sampling_params": _greedy()}
        header = subject.tokens(5, 4)
        _assert_same(
            c.decode(header, parents=[here], **at), c.decode(header, parents=[there], **at)
        )


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


def test_permutation(subject: Subject) -> None:
    with Choreography(subject.llm) as c:
        parents = [c.prefill(subject.tokens(length, length)) for length in (35, 64, 20)]
        offsets = [80, 0, 150]
        orders = ([0, 1, 2], [2, 0, 1], [1, 0, 2])
        answers = [
            c.decode(
                subject.tokens(12, 5),
                parents=[parents[i] for i in order],
                offsets=[offsets[i] for i in order],
                new_offset=110,
                sampling_params=_greedy(),
            )
            for order in orders
        ]
        _assert_same(answers[0], answers[1])
        _assert_same(answers[0], answers[2])


def _isolated_calls(subject: Subject, parents: list[Message]) -> list[dict[str, Any]]:
    first, second = parents
    places: list[tuple[list[Message], list[int] | None]] = [
        ([first, second], None),
        ([second, first], None),
        ([first], [300]),
        ([], None),
    ]
    return [
        {
            "header": subject.tokens(5 + 30 * index, 10 + index),
            "parents": named,
            **({} if offsets is None else {"offsets": offsets}),
            "sampling_params": _greedy(3 + index),
        }
        for index, (named, offsets) in enumerate(places)
    ]


def _as_request(call: dict[str, Any], c: Choreography) -> tuple[dict[str, Any], SamplingParams]:
    """The same call as a request for `LLM.generate`, beside ordinary ones."""
    params = ChoreoParams(
        parents=tuple(ParentSpan(parent.id) for parent in call["parents"]),
        offsets=call.get("offsets"),
        session=c.session,
    )
    return {"prompt_token_ids": call["header"]}, params.apply(call["sampling_params"])


def test_isolation(subject: Subject) -> None:
    prompts = [subject.tokens(70, 30), subject.tokens(3, 31)]
    alone = [_ordinary(subject.llm, [prompt])[0] for prompt in prompts]
    with Choreography(subject.llm) as c:
        parents = c.prefill([{"tokens": subject.tokens(n, n)} for n in (50, 33)])
        calls = _isolated_calls(subject, parents)
        single = [
            c.decode(call["header"], **{k: v for k, v in call.items() if k != "header"})
            for call in calls
        ]
        for left, right in zip(single, c.decode(calls), strict=True):
            _assert_same(left, right)
        # The prefix cache would otherwise spare the ordinary requests their prefill in the batch.
        subject.llm.reset_prefix_cache()
        requests = [_as_request(call, c) for call in calls]
        for position, prompt in zip((1, 3), prompts, strict=True):
            requests.insert(position, ({"prompt_token_ids": prompt}, _greedy()))
        inputs, params = zip(*requests, strict=True)
        outputs = subject.llm.generate(list(inputs), list(params), use_tqdm=False)
        mixed = [output.outputs[0] for output in outputs]
        for left, index in zip(alone, (1, 3), strict=True):
            _assert_same(left, mixed.pop(index - (index > 1)))
        for left, right in zip(single, mixed, strict=True):
            _assert_same(left, right)


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


def test_eviction(subject: Subject) -> None:
    with Choreography(subject.llm) as c:
        document = c.prefill(subject.tokens(70, 50))
        notes = c.decode(
            subject.tokens(9, 51), parents=[document], new_offset=200, sampling_params=_greedy()
        )
        call = {
            "header": subject.tokens(6, 52),
            "parents": [notes, (document, 10, 60)],
            "sampling_params": _greedy(),
        }
        before = c.decode(**call)
        free_blocks = c.stats()["num_free_blocks"]
        c.evict(document, notes)
        assert c.stats()["num_free_blocks"] > free_blocks
        _assert_same(before, c.decode(**call))
        # And a message whose own parents are gone as well.
        c.evict(document, notes, before)
        again = {"sampling_params": _greedy(), "offsets": [40], "parents": [before]}
        answer = c.decode(subject.tokens(3, 53), **again)
        c.evict(before)
        _assert_same(answer, c.decode(subject.tokens(3, 53), **again))


@pytest.mark.parametrize("at", [1, 32, 45])
def test_split(subject: Subject, at: int) -> None:
    text, header = subject.tokens(60, 60), subject.tokens(8, 61)
    with Choreography(subject.llm) as c:
        context = c.prefill(subject.tokens(20, 62))
        whole_text = c.prefill(text, parents=[context], offsets=[100], new_offset=30)
        x = c.prefill(text[:at], parents=[context], offsets=[100], new_offset=30)
        y = c.prefill(text[at:], parents=[context, x], offsets=[100, 30], new_offset=30 + at)
        place = {"new_offset": 150, "sampling_params": _greedy()}
        together = c.decode(header, parents=[whole_text], offsets=[70], **place)
        apart = c.decode(header, parents=[x, y], offsets=[70, 70 + at], **place)
        _assert_same(together, apart)


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

# SPDX-License-Identifier: Apache-2.0
"""Exact mode against ordinary requests on the concatenated text, on random programs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.query_scaling import scales_queries
from vllm_choreo.errors import LimitError, OffsetError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.params import ChoreoParams

NUM_PROGRAMS = 12
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["llama", "bloom", "ministral3"])
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


@pytest.mark.parametrize("seed", sampled(range(NUM_PROGRAMS), 2))
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


@pytest.mark.parametrize("seed", sampled(range(NUM_PROGRAMS), 2))
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


# -- what exact mode costs -----------------------------------------------------------------------


def test_each_copy_is_encoded_once(llm: Any) -> None:
    rng = random.Random(1)
    with Choreography(llm) as c:
        a, b, d = (c.prefill(_tokens(rng, n)) for n in (40, 33, 50))
        header = _tokens(rng, 5)
        call = {"header": header, "parents": [a, b, d], "mode": "exact"}
        first = c.decode([call], sampling_params=_greedy())[0]
        assert first.usage.encoded_tokens == 33 + 50 + 5 + MAX_TOKENS
        assert first.usage.reused_tokens == 40
        # In parallel and later, after the same beginning, nothing is encoded but the new tokens.
        again = c.decode([call, {**call, "parents": [a, b]}, call], sampling_params=_greedy())
        for message in again:
            assert message.usage.encoded_tokens == 5 + MAX_TOKENS
            assert message.usage.repositioned_tokens == 0
        assert first.generated_token_ids == again[0].generated_token_ids
        # What was generated in exact mode continues the chain.
        chain = c.decode("t7", parents=[a, b, d, first], mode="exact", sampling_params=_greedy())
        assert chain.usage.encoded_tokens == 1 + MAX_TOKENS
        stats = c.stats()
        assert (stats["num_copies"], stats["num_messages"]) == (2, 3 + 5 + 2)
        # In another order everything but the first is encoded again.
        other = c.decode(header, parents=[b, a], mode="exact", sampling_params=_greedy())
        assert (other.usage.reused_tokens, other.usage.encoded_tokens) == (33, 40 + 5 + MAX_TOKENS)
        # Copies go with their messages, and so do the blocks of both.
        c.evict(b)
        held = [m["is_copy"] for m in c.stats()["messages"] if m["id"] == b.id and m["blocks"]]
        assert held == []
        c.free(a)
        assert c.stats()["num_copies"] == 0


def test_parallel_calls_that_need_the_same_copy_encode_it_once(c: Choreography) -> None:
    rng = random.Random(2)
    a, b = c.prefill(_tokens(rng, 40)), c.prefill(_tokens(rng, 40))
    calls = [{"header": _tokens(rng, 3), "parents": [a, b]} for _ in range(4)]
    answers = c.decode(calls, sampling_params=_greedy())
    total = sum(answer.usage.encoded_tokens for answer in answers)
    assert total == 40 + 4 * (3 + MAX_TOKENS)
    assert c.stats()["num_copies"] == 1


def test_copies_of_equal_texts_share_their_blocks(c: Choreography) -> None:
    rng = random.Random(3)
    tokens = _tokens(rng, 70)
    a, b, same = c.prefill([{"tokens": t} for t in (_tokens(rng, 9), tokens, tokens)])
    c.decode("t7", parents=[a, b], sampling_params=_greedy(2))
    answer = c.decode("t7", parents=[a, same], sampling_params=_greedy(2))
    assert answer.usage.encoded_tokens == 70 - 64 + 1 + 2  # but for the last block


def test_a_stop_string_ends_an_exact_call(llm: Any, c: Choreography) -> None:
    rng = random.Random(4)
    a, b = c.prefill(_tokens(rng, 40)), c.prefill(_tokens(rng, 30))
    call = {"header": [9, 8], "parents": [a, b]}
    free_run = c.decode([call], sampling_params=_greedy())[0]
    c.free(a)
    a = c.prefill(a.token_ids)
    stop = _greedy(stop=[f"t{free_run.generated_token_ids[2]}"])
    stopped = c.decode([9, 8], parents=[a, b], sampling_params=stop)
    assert stopped.usage.exact and stopped.finish_reason == "stop"
    assert stopped.generated_token_ids == free_run.generated_token_ids[: len(stopped.logprobs)]
    # The copy of b was encoded for the draft.
    assert stopped.usage.encoded_tokens == 30 + stopped.num_tokens
    assert_equals_requests(llm, [_text(call)], [stopped])


def test_positions_are_those_of_a_text_anywhere(llm: Any, c: Choreography) -> None:
    rng = random.Random(5)
    a, b = c.prefill(_tokens(rng, 40)), c.prefill(_tokens(rng, 30))
    call = {"header": [9, 8], "parents": [a, b]}
    if scales_queries(llm.llm_engine.model_config.hf_text_config):
        with pytest.raises(OffsetError, match="begins at position 0"):
            c.decode(**call, offsets=[100, 140], new_offset=170, sampling_params=_greedy())
        return
    here, there = (
        c.decode([9, 8], parents=[a, b], sampling_params=_greedy(), **at)
        for at in ({}, {"offsets": [100, 140], "new_offset": 170})
    )
    assert there.position == 170 and there.usage.exact
    assert there.usage.repositioned_tokens == 70
    assert_equals_requests(llm, [_text(call)] * 2, [here, there])
    # Where only the engine knows the length of a parent.
    draft = ChoreoParams(save_as="draft", session=c.session).apply(_greedy(3))
    reader = ChoreoParams(
        parents=("draft",), offsets=(0,), new_offset=9, exact=True, session=c.session
    ).apply(_greedy(3))
    inputs = [{"prompt_token_ids": [7, 7]}] * 2
    outputs = llm.generate(inputs, [draft, reader], use_tqdm=False)
    report = outputs[1].kv_transfer_params["choreo_error"]
    assert report["type"] == "OffsetError" and "exact mode" in report["message"]


def test_parents_that_are_still_generated(llm: Any, c: Choreography) -> None:
    """The engine chains exact calls itself: copies of what is not known yet are made when it is."""
    rng = random.Random(6)
    names = ("one", "two", "three", "four")
    parents: tuple[tuple[str, ...], ...] = ((), (), ("one", "two"), ("two", "one", "three"))
    headers = [_tokens(rng, n) for n in (30, 9, 14, 3)]
    params = [
        ChoreoParams(parents=named, save_as=name, session=c.session, exact=True).apply(_greedy())
        for name, named in zip(names, parents, strict=True)
    ]
    inputs = [{"prompt_token_ids": header} for header in headers]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    said = {
        name: [*header, *output.outputs[0].token_ids]
        for name, header, output in zip(names, headers, outputs, strict=True)
    }
    for output, header, named in zip(outputs, headers, parents, strict=True):
        assert output.kv_transfer_params["choreo"]["exact"]
        text = [*(token for name in named for token in said[name]), *header]
        (plain,) = llm.generate({"prompt_token_ids": text}, _greedy(), use_tqdm=False)
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_the_page_on_exactness_runs(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text(encoding="utf-8")
    scope = {"llm": engine_slot(tiny_model_path("llama"))}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "exactness.md", "exec"), scope)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reposition", sampled(["in_place", "query"], 1))
def test_in_a_pool_that_is_too_small(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], reposition: str
) -> None:
    """Copies are evicted and encoded again as all messages are, and every block comes back."""
    llm = engine_slot(
        tiny_model_path("llama"),
        num_gpu_blocks_override=24,
        max_model_len=512,
        additional_config={"choreo": {"reposition": reposition}},
    )
    rng = random.Random(7)
    with Choreography(llm, mode="exact") as c:
        free = c.stats()["num_free_blocks"]
        docs = [c.prefill(_tokens(rng, rng.randrange(30, 70))) for _ in range(6)]
        calls = [
            {"header": _tokens(rng, 3), "parents": rng.sample(docs, rng.randrange(1, 5))}
            for _ in range(30)
        ]
        answers = c.decode(calls, sampling_params=_greedy(3))
        assert c.stats()["num_evictions"] > 10
        assert all(answer.usage.exact for answer in answers)
        c.evict(*docs)
        answers += c.decode(calls[:4], sampling_params=_greedy(3))
        texts = [_text(call) for call in (*calls, *calls[:4])]
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free
    assert_equals_requests(llm, texts, answers)


def test_a_session_keeps_as_many_copies_as_it_may(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """However many orders its messages are read in; the answers are those of the text."""
    settings = {"choreo": {"max_copies_per_session": 12}}
    llm = engine_slot(tiny_model_path("llama"), additional_config=settings)
    rng = random.Random(9)
    with Choreography(llm) as c:
        parts = [c.prefill(_tokens(rng, 20)) for _ in range(5)]
        orders = [rng.sample(parts, 5) for _ in range(12)]
        calls = [{"header": [5, 6], "parents": order, "mode": "exact"} for order in orders]
        for call in calls + calls[:2]:
            answer = c.decode(**call, sampling_params=_greedy())
            text = {"prompt_token_ids": _text(call)}
            (output,) = llm.generate(text, _greedy(), use_tqdm=False)
            assert answer.usage.exact
            assert answer.generated_token_ids == tuple(output.outputs[0].token_ids)
            c.free(answer)
            assert c.stats()["num_copies"] <= 12
        # All at once they need more than that: some are refused, and the others as they were.
        with pytest.raises(LimitError, match="max_copies_per_session"):
            c.decode(calls, sampling_params=_greedy())
        assert c.stats()["num_copies"] <= 12
        assert c.decode(**calls[0], sampling_params=_greedy()).usage.exact

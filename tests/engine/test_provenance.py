# SPDX-License-Identifier: Apache-2.0
"""No trace of a denied message reaches a call: tried on the engine, with and without the client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.quick import ONE_PROCESS
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.errors import DeniedMessageError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.params import ChoreoParams


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


def _greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, **options
    )


def _words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 511) for _ in range(count)]


def _logprobs(message: Message) -> list[dict[int, float]]:
    return [{t: entry.logprob for t, entry in step.items()} for step in message.logprobs]


@dataclass(frozen=True)
class Game:
    """Two prisoners: Alice plans in private, then speaks; Bob hears her and answers."""

    situation: Message
    secret: Message
    plan: Message
    utterance: Message


def _alice(c: Choreography, secret: int) -> Game:
    """Her utterance has always the same words, whatever she has planned."""
    situation = c.prefill(_words(1, 40), save_as="situation")
    told = c.prefill(_words(secret, 20), save_as="secret")
    plan = c.decode(
        _words(2, 5), parents=[situation, told], sampling_params=_greedy(8), save_as="plan"
    )
    utterance = c.prefill(_words(3, 40), parents=[situation, plan], save_as="utterance")
    return Game(situation, told, plan, utterance)


def _bob(c: Choreography, game: Game, heard: Message) -> Message:
    parents = [game.situation, heard]
    answer: Message = c.decode(_words(4, 6), parents=parents, sampling_params=_greedy())
    return answer


# -- the leak ------------------------------------------------------------------------------------


def test_the_leak_is_real_and_a_clean_copy_has_none_of_it(llm: Any) -> None:
    """Bob's log-probabilities depend on the secret; with a clean copy not by a single bit."""
    leaky, clean = [], []
    for secret in (10, 11, 12):
        with Choreography(llm) as c:
            game = _alice(c, secret)
            leaky.append(_logprobs(_bob(c, game, game.utterance)))
        with Choreography(llm) as c:
            game = _alice(c, secret)
            bob = c.deny(game.secret, game.plan)
            copy = bob.reencode(game.utterance, parents=[game.situation])
            assert copy.provenance == {game.situation.id, game.utterance.id}
            assert copy.text == game.utterance.text
            clean.append(_logprobs(_bob(bob, game, copy)))
    assert leaky[0] != leaky[1] and leaky[1] != leaky[2]
    assert clean[0] == clean[1] == clean[2]


@pytest.mark.parametrize("mode", ["exact", "baseline"])
def test_text_has_no_leak(llm: Any, mode: str) -> None:
    answers = []
    for secret in (10, 11):
        llm.reset_prefix_cache()
        with Choreography(llm, mode=mode) as c:
            game = _alice(c, secret)
            answers.append(_logprobs(_bob(c.deny(game.secret, game.plan), game, game.utterance)))
    assert answers[0] == answers[1]


def test_the_leak_is_refused_with_its_path(c: Choreography) -> None:
    game = _alice(c, 10)
    bob = c.deny(game.secret)
    with pytest.raises(DeniedMessageError, match="secret ← plan ← utterance"):
        _bob(bob, game, game.utterance)
    # A message that has heard the utterance is no way around it.
    heard = c.prefill(_words(5, 9), parents=[(game.utterance, 3, 7)], save_as="heard")
    with pytest.raises(DeniedMessageError, match="secret ← plan ← utterance ← heard"):
        bob.decode([5], parents=[heard], sampling_params=_greedy())
    # Read as text she says what she says, and what has read that is clean.
    exact = bob.decode([5], parents=[game.utterance], mode="exact", sampling_params=_greedy())
    assert exact.provenance == {game.utterance.id}
    assert bob.decode([6], parents=[exact], sampling_params=_greedy()).usage.encoded_tokens == 5


def test_a_guess_is_told_nothing_by_what_is_reused(c: Choreography) -> None:
    """Equal recipes share blocks, and `usage` shows it: but not with what is denied."""
    tokens = _words(7, 70)
    secret = c.prefill(tokens)
    bob = c.deny(secret)
    right, wrong = bob.prefill([{"tokens": tokens}, {"tokens": _words(8, 70)}])
    assert right.usage == wrong.usage
    assert c.prefill(tokens).usage.reused_tokens == 64


def test_a_guess_is_told_nothing_by_what_was_copied_behind_the_denied_message(
    c: Choreography,
) -> None:
    """A copy in the context of the right guess is not the one in the context of the secret."""
    tokens, said = _words(7, 70), c.prefill(_words(9, 70))
    secret = c.prefill(tokens)
    read = {"mode": "exact", "sampling_params": _greedy(1)}
    c.decode([5], parents=[secret, said], **read)
    bob = c.deny(secret)
    usages = []
    for guess in (bob.prefill(tokens), bob.prefill(_words(8, 70))):
        usages.append(bob.decode([5], parents=[guess, said], **read).usage)
    assert usages[0] == usages[1] and usages[0].exact


# -- without the client --------------------------------------------------------------------------


def _error(output: Any) -> str:
    report = (output.kv_transfer_params or {}).get("choreo_error", {})
    return f"{report.get('type')}: {report.get('message')}"


def test_the_engine_refuses_raw_requests(llm: Any, c: Choreography) -> None:
    """With freed ancestors, parts, twins of the same recipe, copies, and pending parents."""
    game = _alice(c, 10)
    same = c.prefill(game.utterance.token_ids, parents=[game.situation, game.plan])
    assert same.usage.encoded_tokens == 40 - 32, "its blocks are those of the utterance"
    copied = c.reencode(game.secret)
    public = c.prefill(_words(9, 10))
    c.free(game.secret, game.plan)
    denied = {"deny": (game.secret.id,), "session": c.session}
    draft = ChoreoParams(parents=(game.utterance.id,), save_as="draft", session=c.session)
    attempts: list[tuple[ChoreoParams, str]] = [
        (draft, "None"),
        (ChoreoParams(parents=(game.utterance.id,), **denied), "plan ← utterance"),
        (ChoreoParams(parents=((game.utterance.id, 0, 1),), **denied), "plan ← utterance"),
        (ChoreoParams(parents=(same.id,), **denied), "secret ← plan ← "),
        (ChoreoParams(parents=(copied.id,), **denied), "secret ← "),
        (ChoreoParams(parents=(copied.id,), exact=True, **denied), "secret ← "),
        (ChoreoParams(parents=("draft",), **denied), "secret ← plan ← utterance ← draft"),
        (ChoreoParams(copy_of=copied.id, kind="prefill", **denied), "secret ← "),
        (ChoreoParams(parents=(public.id,), **denied), "None"),
        (ChoreoParams(parents=("draft", public.id), exact=True, **denied), "None"),
    ]
    params = [attempt.apply(_greedy()) for attempt, _ in attempts]
    inputs = [{"prompt_token_ids": [7, 8, 9]}] * len(attempts)
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for output, (attempt, expected) in zip(outputs, attempts, strict=True):
        assert expected in _error(output), attempt
        assert expected == "None" or _error(output).startswith("DeniedMessageError")


def test_a_refused_call_takes_nothing_with_it(llm: Any, c: Choreography) -> None:
    """It holds no blocks, its name is free, and calls that waited for it are told."""
    game = _alice(c, 10)
    before = c.stats()
    refused = ChoreoParams(
        parents=(game.utterance.id,), save_as="r", deny=(game.plan.id,), session=c.session
    )
    reader = ChoreoParams(parents=("r",), session=c.session)
    inputs = [{"prompt_token_ids": [7, 8]}] * 2
    params = [refused.apply(_greedy()), reader.apply(_greedy())]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    assert "UnknownMessageError" in _error(outputs[1])
    assert c.stats() == before
    again = ChoreoParams(parents=(game.situation.id,), save_as="r", session=c.session)
    (output,) = llm.generate(inputs[:1], again.apply(_greedy()), use_tqdm=False)
    assert output.kv_transfer_params["choreo"]["id"] == "r"


# -- overlapping calls ---------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pending_calls_in_exact_mode_and_under_a_policy(
    tiny_model_path: Callable[[str], Path],
) -> None:
    """AsyncLLM has its engine in a process of its own."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        str(tiny_model_path("llama")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        distributed_executor_backend=ONE_PROCESS,
    )

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(args)
        try:
            async with AsyncChoreography(llm) as c, AsyncChoreography(llm, "baseline") as b:
                answers = [await program(session) for session in (c, b)]
                assert answers[0].token_ids == answers[1].token_ids
                assert answers[0].usage.exact
                await refuse(c)
        finally:
            llm.shutdown()

    async def program(c: AsyncChoreography) -> Message:
        doc = await c.prefill(_words(1, 40))
        draft = await c.submit(header="t7", sampling_params=_greedy(20))
        stops = await c.submit(header="t8", sampling_params=_greedy(20, stop=["t9 "]))
        parents = [doc, draft, stops, doc]
        one = await c.submit(header="t9", parents=parents, mode="exact", sampling_params=_greedy(6))
        two = await c.submit(
            header="t5", parents=[*parents, one], mode="exact", sampling_params=_greedy(6)
        )
        return await two

    async def refuse(c: AsyncChoreography) -> None:
        secret = await c.submit(header="t7", sampling_params=_greedy(20), save_as="secret")
        plan = await c.submit(header="t8", parents=[secret], sampling_params=_greedy())
        bob = c.deny(secret)
        with pytest.raises(DeniedMessageError):
            await bob.submit(header="t9", parents=[plan])
        exact = await bob.submit(
            header="t9", parents=[plan], mode="exact", sampling_params=_greedy()
        )
        assert (await exact).provenance == {plan.id}
        clean = await bob.reencode(await plan)
        assert clean.provenance == {plan.id}

    asyncio.run(run())

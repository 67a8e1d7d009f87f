# SPDX-License-Identifier: Apache-2.0
"""The public interface on a real engine: a tiny model with random weights, greedy, float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.quick import ONE_PROCESS
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.errors import (
    ChoreoError,
    FreedMessageError,
    ParentFailedError,
    PoolFullError,
    TooLongError,
)
from vllm_choreo.semantics.message import Message

# Float32 sums in another order: measured differences stay below 1e-4.
LOGPROB_TOLERANCE = 1e-3


def words(first: int, count: int) -> list[int]:
    """`count` token ids that do not repeat with a short period."""
    return [5 + (first * 31 + 17 * i + i * i) % 480 for i in range(count)]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **options
    )


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


@pytest.fixture(params=["choreo", "baseline"])
def c(llm: Any, request: pytest.FixtureRequest) -> Iterator[Choreography]:
    with Choreography(llm, mode=request.param) as session:
        yield session


def sampled_logprobs(message: Message) -> list[float]:
    return [
        step[token].logprob
        for step, token in zip(message.logprobs, message.generated_token_ids, strict=True)
    ]


def assert_same_answer(one: Message, other: Message) -> None:
    assert one.token_ids == other.token_ids
    assert sampled_logprobs(one) == pytest.approx(sampled_logprobs(other), abs=LOGPROB_TOLERANCE)


def conversation(c: Choreography) -> list[Message]:
    """A chain: each call reads the whole history."""
    doc = c.prefill(words(1, 70))
    question = c.prefill(words(2, 9), parents=[doc])
    answer = c.decode("t7 t8", parents=[doc, question], sampling_params=greedy(12))
    history = [doc, question, answer]
    again = c.decode(
        [{"header": "t9", "parents": history}, {"header": words(3, 5), "parents": history}],
        sampling_params=greedy(8),
    )
    return [answer, *again]


def test_a_chain_gives_the_same_answers_in_both_modes(llm: Any) -> None:
    with Choreography(llm) as choreo, Choreography(llm, mode="baseline") as baseline:
        for one, other in zip(conversation(choreo), conversation(baseline), strict=True):
            assert_same_answer(one, other)
            assert one.usage.exact and other.usage.exact
            assert one.position == other.position
            assert one.text == other.text


def test_a_result_says_what_it_cost(llm: Any) -> None:
    with Choreography(llm) as c:
        doc = c.prefill(words(1, 40))
        moved = c.decode("t7", parents=[doc], offsets=[3], new_offset=50, sampling_params=greedy(5))
        assert (doc.usage.encoded_tokens, doc.usage.reused_tokens) == (40, 0)
        assert (moved.usage.encoded_tokens, moved.usage.reused_tokens) == (6, 40)
        assert moved.usage.repositioned_tokens == 40
        assert moved.position == 50
        assert not moved.usage.exact
        assert 0 < moved.metrics.ttft < moved.metrics.latency
        assert 0 < doc.metrics.ttft == doc.metrics.latency


def test_the_baseline_reports_its_prefix_hits(llm: Any) -> None:
    llm.reset_prefix_cache()
    with Choreography(llm, mode="baseline") as c:
        doc = c.prefill(words(4, 100))
        first, second = (
            c.decode(header, parents=[doc], sampling_params=greedy(4)) for header in ("t7", "t8")
        )
    assert (first.usage.reused_tokens, first.usage.encoded_tokens) == (0, 105)
    # Three whole blocks of 32.
    assert (second.usage.reused_tokens, second.usage.encoded_tokens) == (96, 9)


def test_text_is_tokenised_without_special_tokens(c: Choreography) -> None:
    message = c.decode("t30 t41", sampling_params=greedy(3))
    assert message.token_ids[:2] == (30, 41)
    assert message.num_tokens == 5
    assert message.text.startswith("t30 t41")
    assert message.finish_reason == "length"


def test_the_end_of_sequence_token_is_part_of_the_message(c: Choreography) -> None:
    eos = c._llm.get_tokenizer().eos_token_id
    forced = SamplingParams(max_tokens=9, logit_bias={eos: 100.0})
    message = c.decode("t40", sampling_params=forced)
    assert message.token_ids == (40, eos)
    assert message.finish_reason == "stop"
    assert c.decode("t30", parents=[message], sampling_params=greedy(2)).num_tokens == 3


def test_a_message_that_ended_on_a_stop_string_can_be_read(llm: Any) -> None:
    answers = []
    for mode in ("choreo", "baseline"):
        with Choreography(llm, mode=mode) as c:
            doc = c.prefill(words(1, 40))
            free_run = c.decode("t7", parents=[doc], sampling_params=greedy(10))
            fourth = f"t{free_run.generated_token_ids[3]}"
            stop = greedy(10, stop=[fourth])
            stopped = c.decode("t7", parents=[doc], sampling_params=stop, save_as="stopped")
            assert stopped.finish_reason == "stop"
            assert stopped.generated_token_ids == free_run.generated_token_ids[:4]
            history = [doc, stopped]
            answers.append(c.decode("t8", parents=history, sampling_params=greedy(8)))
    assert_same_answer(*answers)


def test_an_evicted_message_gives_the_same_answer(llm: Any) -> None:
    with Choreography(llm) as c:
        doc = c.prefill(words(1, 50))
        made = c.decode("t7", parents=[doc], offsets=[9], sampling_params=greedy(10))
        before = c.decode("t8", parents=[made, doc], sampling_params=greedy(10))
        c.evict(doc, made)
        assert_same_answer(before, c.decode("t8", parents=[made, doc], sampling_params=greedy(10)))


def test_parallel_calls_equal_single_ones(c: Choreography) -> None:
    docs = c.prefill([{"tokens": words(i, 30 + 7 * i)} for i in range(4)])
    items = [{"header": words(i, 3), "parents": docs[: i + 1]} for i in range(4)]
    together = c.decode(items, sampling_params=greedy(6))
    for item, message in zip(items, together, strict=True):
        alone = c.decode(item["header"], parents=item["parents"], sampling_params=greedy(6))
        assert_same_answer(message, alone)


def test_what_only_the_engine_can_tell_is_raised_as_a_named_error(llm: Any) -> None:
    with Choreography(llm) as c:
        # Each parent of one token takes a whole block of the virtual sequence.
        parents = [c.prefill([9])] * (llm.model_config.max_model_len // 32)
        with pytest.raises(TooLongError) as caught:
            c.decode("t7", parents=parents, save_as="long", sampling_params=greedy(2))
        assert caught.value.parameter == "parents"
        with pytest.raises(ParentFailedError):
            c.prefill("t8", parents=["long"])
        good, bad = {"header": "t7"}, {"header": "t7", "parents": parents}
        with pytest.raises(TooLongError) as caught:
            c.decode([good, bad, good], sampling_params=greedy(2))
        first, error, last = caught.value.results
        assert isinstance(error, TooLongError)
        assert_same_answer(first, last)
        again = c.decode("t7", sampling_params=greedy(2))
        assert_same_answer(first, again)


def test_sessions_are_apart_and_closing_one_frees_its_messages(llm: Any) -> None:
    with Choreography(llm) as one, Choreography(llm) as two:
        doc, other = one.prefill(words(1, 40)), two.prefill(words(1, 40))
        before = two.decode("t7", parents=[other], sampling_params=greedy(4))
        with pytest.raises(ChoreoError):
            two.decode("t7", parents=[doc])
        assert one.stats()["num_messages"] == 1
        one.free(doc)
        assert one.stats()["num_messages"] == 0
        with pytest.raises(FreedMessageError):
            one.decode("t7", parents=[doc])
        one.close()
        after = two.decode("t7", parents=[other], sampling_params=greedy(4))
        assert_same_answer(before, after)
        num_blocks = two.stats()["num_pool_blocks"]
    with Choreography(llm) as c:
        # The null block is never free.
        assert c.stats()["num_free_blocks"] == num_blocks - 1


def test_a_call_that_can_never_fit_is_refused_and_the_engine_goes_on(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    # 20 blocks of 32 tokens: a context fits, but not the parents of two such calls at once.
    llm = engine_slot(tiny_model_path("llama"), num_gpu_blocks_override=20, max_model_len=512)
    with Choreography(llm) as c:
        docs = [c.prefill(words(i, 150)) for i in range(4)]
        try:
            c.decode("t7", parents=docs, sampling_params=greedy(4))
        except (PoolFullError, TooLongError) as error:
            assert error.parameter == "parents"
        else:
            pytest.fail("600 tokens were accepted in a context of 512")
        assert c.decode("t7", parents=docs[:3], sampling_params=greedy(4)).num_tokens == 5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_async_calls_stream_overlap_and_end_early(tiny_model_path: Callable[[str], Path]) -> None:
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
                await agree(c, b)
                await overlap(c)
                await leave_early(c)
        finally:
            llm.shutdown()

    async def agree(c: AsyncChoreography, b: AsyncChoreography) -> None:
        answers = []
        for session in (c, b):
            doc = await session.prefill(words(1, 70))
            first = await session.decode("t7", parents=[doc], sampling_params=greedy(12))
            pieces = [
                piece
                async for piece in session.stream_decode(
                    "t8", parents=[doc, first], sampling_params=greedy(12)
                )
            ]
            assert len(pieces) > 3, "it arrives in pieces"
            message = pieces[-1].message
            assert message is not None
            assert "".join(piece.text for piece in pieces) == message.generated_text
            answers.append(message)
        assert_same_answer(*answers)

    async def overlap(c: AsyncChoreography) -> None:
        doc = await c.prefill(words(1, 40))
        draft = await c.submit(header="t7", parents=[doc], sampling_params=greedy(20))
        review = await c.submit(header="t8", parents=[doc, draft], sampling_params=greedy(6))
        assert_same_answer(
            await review,
            await c.decode("t8", parents=[doc, await draft], sampling_params=greedy(6)),
        )

    async def leave_early(c: AsyncChoreography) -> None:
        async for _ in c.stream_decode("t7", save_as="left", sampling_params=greedy(1000)):
            break
        with pytest.raises(ParentFailedError):
            await c.decode("t8", parents=["left"])
        while (await c.stats())["num_calls"]:  # the engine ends the call, too
            await asyncio.sleep(0.1)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.exhaustive  # test_processes.py has such engines in every run
def test_an_engine_in_its_own_process_gives_the_same_answers(
    llm: Any, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.engines import start_engine, stop_engine

    with Choreography(llm) as c:
        expected = conversation(c)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    other = start_engine(tiny_model_path("llama"), distributed_executor_backend=ONE_PROCESS)
    try:
        with Choreography(other) as c:
            for one, two in zip(expected, conversation(c), strict=True):
                assert_same_answer(one, two)
                assert two.metrics.ttft > 0
            with pytest.raises(TooLongError):
                c.decode("t7", parents=[c.prefill([9])] * 64)
    finally:
        stop_engine(other)

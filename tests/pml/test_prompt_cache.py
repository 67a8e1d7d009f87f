# SPDX-License-Identifier: Apache-2.0
"""`PromptCache` and `AsyncPromptCache` on a real engine: memory, batches, what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.pml.trees import Words
from tests.quick import ONE_PROCESS
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.errors import ChoreoError, FreedMessageError, PmlError, UnknownSchemaError
from vllm_choreo.pml import AsyncPromptCache, PromptCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
LOGPROB_TOLERANCE = 5e-4


def words(first: int, count: int) -> str:
    return "".join(f" t{5 + (first * 31 + 17 * i + i * i) % 480}" for i in range(count)) + " "


SCHEMA = f"""<schema name="s">{words(0, 5)}
  <module name="a">{words(1, 64)}</module>
  <module name="b">{words(2, 64)}<param name="x" len="4"/>{words(3, 28)}</module>
  <scaffold modules="a b"/>
</schema>"""
PROMPT = f'<prompt schema="s"><a/><b x="t7 t8"/>{words(4, 3)}</prompt>'
ALONE = f'<prompt schema="s"><b/>{words(5, 3)}</prompt>'


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), max_num_seqs=128)


@pytest.fixture
def cache(c: Choreography) -> PromptCache:
    made = PromptCache(c, Words())
    made.register(SCHEMA)
    return made


def logprobs(message: Any) -> list[float]:
    return [
        step[token].logprob
        for token, step in zip(message.generated_token_ids, message.logprobs, strict=True)
    ]


def assert_same(one: Any, other: Any) -> None:
    assert one.message.token_ids == other.message.token_ids
    assert logprobs(one.message) == pytest.approx(logprobs(other.message), abs=LOGPROB_TOLERANCE)


def test_what_is_taken_is_encoded_once(c: Choreography, cache: PromptCache) -> None:
    first = cache.decode(ALONE, sampling_params=GREEDY)
    assert len(cache.messages("s")) == 2 and c.stats()["num_messages"] == 3
    again = cache.decode([ALONE, ALONE], sampling_params=GREEDY)
    assert len(cache.messages("s")) == 2
    for answer in again:
        assert_same(answer, first)
        assert answer.message.usage.encoded_tokens == 3 + 6
        assert (answer.usage.module_tokens, answer.usage.new_tokens) == (5 + 96, 3)
    assert "encoded" in cache.show("s")
    # The whole schema: three segments, of which the scaffold has an encoding of each.
    assert cache.encode("s") == 4 and len(cache.messages("s")) == 6 and cache.encode("s") == 0


def test_modules_of_twenty_prompts_in_flight_lie_once(
    llm: Any, c: Choreography, cache: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.encode("s")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    before, seen = pool.get_num_free_blocks(), []
    schedule = scheduler.schedule

    def spy(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.append((len(scheduler.running), before - pool.get_num_free_blocks()))
        return output

    monkeypatch.setattr(scheduler, "schedule", spy)
    answers = cache.decode([ALONE] * 10 + [PROMPT.replace(' x="t7 t8"', "")] * 10)
    assert len(answers) == 20
    # The modules of a prompt are four blocks and more; each prompt takes one of its own.
    assert max(running for running, _ in seen) == 20
    assert max(used for _, used in seen) == 20


def test_a_hundred_prompts_are_one_batch(c: Choreography, cache: PromptCache) -> None:
    asked = [PROMPT.replace("t7 t8", f"t{n} t{n + 1}") for n in range(10, 110)]
    answers = cache.decode(asked, sampling_params=GREEDY)
    before = c.stats()["num_messages"]
    assert before == 3 + 100, "arguments are freed, modules of the scaffold and answers are not"
    for number in (0, 57):
        assert_same(cache.decode(asked[number], sampling_params=GREEDY), answers[number])
    assert answers[3].usage.argument_tokens == 2


def test_options_are_passed_on(c: Choreography, cache: PromptCache) -> None:
    asked = [
        {"prompt": ALONE, "save_as": "kept", "sampling_params": GREEDY.clone()},
        {"prompt": PROMPT, "repair": "first:4", "mode": "choreo"},
    ]
    first, repaired = cache.decode(asked, sampling_params=GREEDY)
    assert c.message("kept") is first.message and first.text == first.message.generated_text
    assert first.message.usage.repaired_tokens == 0 < repaired.message.usage.repaired_tokens
    # An answer can be read on like any message.
    c.decode([5, 6], parents=[repaired.message], sampling_params=GREEDY)
    with pytest.raises(PmlError, match="no such option"):
        cache.decode(ALONE, parents=[])
    with pytest.raises(PmlError, match="needs prompts"):
        cache.decode([])


def test_modules_are_evicted_pinned_and_freed(c: Choreography, cache: PromptCache) -> None:
    first = cache.decode(PROMPT, sampling_params=GREEDY)
    cache.evict("s")
    assert_same(cache.decode(PROMPT, sampling_params=GREEDY), first)
    cache.pin("s", ttl=60)
    assert c.stats()["num_pinned"] == len(cache.messages("s")) == 6
    modules = cache.messages("s")
    cache.unregister("s")
    assert "s" not in cache.schemas and c.stats()["num_pinned"] == 0
    with pytest.raises(FreedMessageError):
        c.decode([5], parents=modules[:1])
    for call in (lambda: cache.decode(PROMPT), lambda: cache.encode("s"), lambda: cache.show("s")):
        with pytest.raises(UnknownSchemaError):
            call()


def test_a_prompt_that_fails_leaves_nothing(c: Choreography, cache: PromptCache) -> None:
    cache.encode("s")
    before = c.stats()["num_messages"]
    with pytest.raises(ChoreoError):
        cache.decode(PROMPT, sampling_params=SamplingParams(n=2))
    assert c.stats()["num_messages"] == before


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_async_cache_does_the_same(tiny_model_path: Callable[[str], Path], llm: Any) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with Choreography(llm) as c:
        cache = PromptCache(c, Words())
        cache.register(SCHEMA)
        expected = cache.decode([PROMPT, ALONE], sampling_params=GREEDY)
    args = AsyncEngineArgs(
        model=str(tiny_model_path("llama")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        distributed_executor_backend=ONE_PROCESS,
    )

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(args)
        try:
            async with AsyncChoreography(engine) as c:
                await agree(c)
        finally:
            engine.shutdown()

    async def agree(c: AsyncChoreography) -> None:
        cache = AsyncPromptCache(c, Words())
        await cache.register(SCHEMA, encode=True)
        assert len(cache.messages("s")) == 6
        answers = await asyncio.gather(
            *(cache.decode(prompt, sampling_params=GREEDY) for prompt in [PROMPT, ALONE] * 5)
        )
        for number, answer in enumerate(answers):
            assert_same(answer, expected[number % 2])
        pieces = [p async for p in cache.stream_decode(PROMPT, sampling_params=GREEDY)]
        assert pieces[-1].message is not None and len(pieces) > 2
        assert "".join(piece.text for piece in pieces) == expected[0].text
        long = SamplingParams(max_tokens=500)
        async with aclosing(cache.stream_decode(PROMPT, sampling_params=long)) as stream:
            async for _ in stream:
                break
        await cache.pin("s")
        await cache.evict("s")
        assert len(c.messages()) == 6 + 11
        await cache.unregister("s")
        assert len(c.messages()) == 11
        await prefetch(c, cache)

    async def prefetch(c: AsyncChoreography, cache: AsyncPromptCache) -> None:
        await cache.register(UNION)
        assert await cache.prefetch("v", "b/c") == 4
        await cache.evict("v")
        before = (await c.stats())["num_resident_tokens"]
        assert await cache.prefetch("v", "b/c") == 0
        assert (await c.stats())["num_resident_tokens"] == before + 4 * 32
        assert len(c.messages()) == 11 + 4, "what brings them back is freed"

    asyncio.run(run())


def test_a_module_behind_a_union_is_that_of_the_text_with_its_stand_in(c: Choreography) -> None:
    """The oracle is an ordinary request: with the stand-in taken nothing differs from text."""
    cache = PromptCache(c, Words())
    cache.register(
        f"""<schema name="u">{words(0, 5)}
        <union scaffold="b"><module name="a">{words(6, 9)}</module>
        <module name="b">{words(7, 20)}</module></union>
        <module name="m">{words(8, 12)}</module></schema>""",
        context="schema",
    )
    taken, other = (
        cache.decode(
            f'<prompt schema="u"><{name}/><m/>{words(9, 3)}</prompt>', sampling_params=GREEDY
        )
        for name in ("b", "a")
    )
    text = "".join(words(seed, count) for seed, count in ((0, 5), (7, 20), (8, 12), (9, 3)))
    plain = c.decode(Words().encode(text), sampling_params=GREEDY)
    assert taken.message.usage.exact and not other.message.usage.exact
    assert taken.message.generated_token_ids == plain.generated_token_ids
    assert logprobs(taken.message) == pytest.approx(logprobs(plain), abs=LOGPROB_TOLERANCE)


UNION = f"""<schema name="v">{words(0, 5)}<union><module name="a">{words(6, 32)}</module>
  <module name="b">{words(7, 32)}<union><module name="c">{words(8, 32)}</module>
  <module name="d">{words(9, 32)}</module></union></module></union></schema>"""


def test_the_members_of_a_union_are_there_before_a_prompt_takes_one(c: Choreography) -> None:
    cache = PromptCache(c, Words())
    cache.register(UNION)

    def resident() -> int:
        return int(c.stats()["num_resident_tokens"])

    cache.decode(f'<prompt schema="v"><a/>{words(3, 3)}</prompt>', sampling_params=GREEDY)
    before = resident()
    assert cache.prefetch("v", "b/c") == 3, "b and what is in it; a is encoded"
    assert resident() == before + 3 * 32 + 1, "and the last token of the answer"
    taken = f'<prompt schema="v"><b><d/></b>{words(3, 3)}</prompt>'
    first = cache.decode(taken, sampling_params=GREEDY)
    cache.evict("v")
    before = resident()
    assert cache.prefetch("v", "b/c") == 0, "all that was known comes back"
    assert resident() == before + 4 * 32
    assert_same(cache.decode(taken, sampling_params=GREEDY), first)
    assert cache.prefetch("v", "a") == 0
    with pytest.raises(PmlError, match="no such module"):
        cache.prefetch("v", "none")
    with pytest.raises(UnknownSchemaError):
        cache.prefetch("nothing", "a")
    cache.register(SCHEMA)
    with pytest.raises(PmlError, match="in no union"):
        cache.prefetch("s", "a")

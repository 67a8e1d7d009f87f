# SPDX-License-Identifier: Apache-2.0
"""A pool that is too small: eviction, encoding again, preemption, chunks; and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import Encoded, Oracle, assert_greedy, random_tokens, whole
from vllm_choreo import Choreography
from vllm_choreo.errors import PoolFullError

POOL_BLOCKS = 21  # one is vLLM's null block: 640 tokens
# vLLM wants room for one sequence of the greatest length.
SMALL_POOL = {"num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": 640}


def _params(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=1)


def _free_blocks(llm: Any) -> int:
    from vllm_choreo.engine.utility import call

    return int(call(llm, "stats", None)["num_free_blocks"])


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Iterator[Any]:
    engine = engine_slot(tiny_model_path("llama"), **SMALL_POOL)
    before = _free_blocks(engine)
    assert before == POOL_BLOCKS - 1
    yield engine
    assert _free_blocks(engine) == before


@pytest.mark.exhaustive
def test_thousand_calls_over_a_tenth_of_their_messages(
    llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    oracle, rng = tiny_oracle("llama"), random.Random(1)
    with Choreography(llm) as c:
        docs: list[tuple[Any, Encoded]] = []
        for _ in range(60):
            tokens = random_tokens(rng, rng.randrange(40, 96))
            docs.append((c.prefill(tokens), oracle.encode(tokens)))
        num_blocks = sum(-(-message.num_tokens // 32) for message, _ in docs)
        assert num_blocks + 1000 > 10 * POOL_BLOCKS  # each call makes a message, too
        calls, expected = [], []
        for _ in range(1000):
            chosen = rng.sample(docs, rng.randrange(1, 4))
            offsets = [rng.randrange(0, 300) for _ in chosen]
            calls.append(
                {
                    "header": random_tokens(rng, 3),
                    "parents": [message for message, _ in chosen],
                    "offsets": offsets,
                    "new_offset": 300,
                }
            )
            parents = zip(chosen, offsets, strict=True)
            expected.append([whole(encoded, offset) for (_, encoded), offset in parents])
        answers = c.decode(calls, sampling_params=_params(2))
        assert c.stats()["num_evictions"] > 100
        for answer, parents in zip(answers, expected, strict=True):
            assert_greedy(answer, oracle, parents, 300)


def test_recipes_are_encoded_again_in_depth(llm: Any, tiny_oracle: Callable[[str], Oracle]) -> None:
    """A chain of messages, all evicted: the last one's recipe needs all the others."""
    oracle, rng = tiny_oracle("llama"), random.Random(2)
    with Choreography(llm) as c:
        messages: list[Any] = []
        everything: list[int] = []
        for _ in range(4):
            tokens = random_tokens(rng, 40)
            everything += tokens
            messages.append(c.prefill(tokens, parents=list(messages)))
        before = c.decode([5, 6], parents=messages, sampling_params=_params(4))
        assert before.usage.exact
        c.evict(*messages)
        assert c.stats()["num_resident"] <= 1
        # `before` reads nothing that is left, and only the last message is asked for.
        alone = c.decode([5, 6], parents=[messages[-1]], sampling_params=_params(4))
        c.evict(*messages)
        again = c.decode([5, 6], parents=messages, sampling_params=_params(4))
        assert again.token_ids == before.token_ids
        assert not alone.usage.exact
        assert_greedy(again, oracle, [whole(oracle.encode(everything), 0)], len(everything))


def test_preempted_calls_come_back_right(llm: Any, tiny_oracle: Callable[[str], Oracle]) -> None:
    """Six calls that outgrow the pool while they generate, beside an ordinary request."""
    oracle, rng = tiny_oracle("llama"), random.Random(3)
    doc_tokens = random_tokens(rng, 70)
    doc = oracle.encode(doc_tokens)
    with Choreography(llm) as c:
        message = c.prefill(doc_tokens)
        calls = [{"header": random_tokens(rng, 5), "parents": [message]} for _ in range(6)]
        answers = c.decode(calls, sampling_params=_params(100))
        for answer in answers:
            assert len(answer.generated_token_ids) == 100
            assert_greedy(answer, oracle, [whole(doc, 0)], len(doc_tokens))


def test_the_same_recipe_is_encoded_once(llm: Any, tiny_oracle: Callable[[str], Oracle]) -> None:
    oracle, rng = tiny_oracle("llama"), random.Random(6)
    tokens = random_tokens(rng, 100)
    with Choreography(llm) as c, Choreography(llm, tenant="other") as other:
        first, second = c.prefill([{"tokens": tokens}, {"tokens": tokens}])
        stranger = other.prefill(tokens)
        assert (first.usage.encoded_tokens, second.usage.encoded_tokens) == (100, 4)
        assert stranger.usage.encoded_tokens == 100
        assert c.stats()["num_blocks"] == 3 + 1 + 1
        with Choreography(llm) as again, Choreography(llm, tenant="other") as other_again:
            assert again.prefill(tokens).usage.encoded_tokens == 4
            assert other_again.prefill(tokens).usage.reused_tokens == 96
        c.free(first)
        answer = c.decode([5], parents=[second], sampling_params=_params(4))
        assert_greedy(answer, oracle, [whole(oracle.encode(tokens), 0)], 100)
        # Elsewhere it is another recipe.
        assert c.prefill(tokens, new_offset=1).usage.encoded_tokens == 100


def test_what_was_generated_is_not_encoded_once_more(llm: Any) -> None:
    """In another session of the tenant, and after the same parents."""
    rng = random.Random(7)
    doc_tokens = random_tokens(rng, 40)
    with Choreography(llm) as c, Choreography(llm) as other:
        parents = [c.prefill(doc_tokens), other.prefill(doc_tokens)]
        answer = c.decode(random_tokens(rng, 60), parents=parents[:1], sampling_params=_params(9))
        same = other.prefill(answer.token_ids, parents=parents[1:])
        assert same.usage.encoded_tokens == 69 - 64
        alone = other.prefill(answer.token_ids)
        assert alone.usage.encoded_tokens == 69


def test_what_never_fits_is_refused_and_others_go_on(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """`x` and `m` fit together, but not beside `p`, without which `m` cannot be encoded again."""
    llm = engine_slot(tiny_model_path("llama"), **SMALL_POOL)
    before = _free_blocks(llm)
    rng = random.Random(5)
    with Choreography(llm) as c:
        p = c.prefill(random_tokens(rng, 310))
        m = c.prefill(random_tokens(rng, 250), parents=[p])
        q = c.prefill(random_tokens(rng, 310))
        x = c.prefill(random_tokens(rng, 250), parents=[q])
        c.evict(m, x)
        with pytest.raises(PoolFullError, match="KV cache"):
            c.decode([5], parents=[m, x], sampling_params=_params(2))
        answer = c.decode([5], parents=[x], sampling_params=_params(2))
        assert len(answer.generated_token_ids) == 2
    assert _free_blocks(llm) == before


def test_an_emptied_prefix_cache_leaves_messages_readable(
    llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    """vLLM wants an empty pool: messages give their blocks back, and are encoded again if read.

    Pinned ones, too.
    """
    oracle, rng = tiny_oracle("llama"), random.Random(6)
    tokens, header = random_tokens(rng, 70), random_tokens(rng, 3)
    with Choreography(llm) as c:
        message = c.prefill(tokens)
        first = c.decode(header, parents=[message], sampling_params=_params(4))
        c.pin(message)
        assert llm.reset_prefix_cache()
        assert _free_blocks(llm) == POOL_BLOCKS - 1
        again = c.decode(header, parents=[message], sampling_params=_params(4))
        assert again.token_ids == first.token_ids
        assert_greedy(again, oracle, [whole(oracle.encode(tokens), 0)], 70)


def test_long_message_in_chunks(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> None:
    """Prefill of more tokens than a step takes, with a reader queued behind it."""
    oracle, rng = tiny_oracle("llama"), random.Random(4)
    llm = engine_slot(tiny_model_path("llama"))
    first, second = random_tokens(rng, 700), random_tokens(rng, 600)
    with Choreography(llm) as c:
        a = c.prefill(first)
        b = c.prefill(second, parents=[a], offsets=[100], new_offset=50)
        answer = c.decode([9], parents=[b, a], sampling_params=_params(4))
        oracle_a = oracle.encode(first)
        oracle_b = oracle.encode(second, [whole(oracle_a, 100)], 50)
        assert_greedy(answer, oracle, [whole(oracle_b, 0), whole(oracle_a, 600)], 1300)

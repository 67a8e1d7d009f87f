# SPDX-License-Identifier: Apache-2.0
"""Who makes room for whom: host memory, shares of tenants, pins. Nothing leaks, nothing wedges."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import Oracle, assert_greedy, random_tokens, whole
from tests.engine.test_memory import SMALL_POOL, _params
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.utility import call
from vllm_choreo.errors import LimitError

# One block of the tiny model: 3 layers, 2 heads, 32 slots, keys and values of 32 float32 numbers.
BLOCK_GIB = 3 * 2 * 32 * 2 * 32 * 4 / 2**30


@pytest.fixture
def start(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Callable[..., Any]:
    """`start(setting=value, ...)`: an engine with a pool of 20 blocks and these settings."""

    def start(**settings: Any) -> Any:
        options = {**SMALL_POOL, "additional_config": {"choreo": settings}}
        return engine_slot(tiny_model_path("llama"), **options)

    return start


def _totals(llm: Any) -> dict[str, int]:
    numbers: dict[str, int] = call(llm, "totals")
    return numbers


def _resident(c: Choreography) -> dict[str, bool]:
    return {m["id"]: m["num_encoded"] == m["num_tokens"] for m in c.stats()["messages"]}


@pytest.mark.parametrize("reposition", sampled(["in_place", "query"], 1))
def test_evicted_messages_come_back_from_host_memory(
    start: Callable[..., Any], tiny_oracle: Callable[[str], Oracle], reposition: str
) -> None:
    llm = start(host_memory_gib=200 * BLOCK_GIB, reposition=reposition)
    oracle, rng = tiny_oracle("llama"), random.Random(1)
    before = _totals(llm)
    assert before["num_host_blocks"] >= 190
    with Choreography(llm) as c:
        docs = []
        for _ in range(24):
            tokens = random_tokens(rng, rng.randrange(40, 96))
            docs.append((c.prefill(tokens), oracle.encode(tokens)))
        for _ in range(12):
            chosen = rng.sample(docs, 3)
            offsets = [rng.randrange(0, 300) for _ in chosen]
            answer = c.decode(
                random_tokens(rng, 3),
                parents=[message for message, _ in chosen],
                offsets=offsets,
                new_offset=300,
                sampling_params=_params(4),
            )
            parents = zip(chosen, offsets, strict=True)
            assert_greedy(
                answer, oracle, [whole(encoded, offset) for (_, encoded), offset in parents], 300
            )
        after = _totals(llm)
        assert after["restored_messages_total"] >= 20
        assert after.get("encoded_again_messages_total", 0) == before.get(
            "encoded_again_messages_total", 0
        )
    after = _totals(llm)
    assert after["num_host_blocks_used"] == 0
    assert after["num_free_blocks"] == before["num_free_blocks"]


def test_what_host_memory_cannot_keep_is_encoded_again(
    start: Callable[..., Any], tiny_oracle: Callable[[str], Oracle]
) -> None:
    llm = start(host_memory_gib=4.5 * BLOCK_GIB)
    oracle, rng = tiny_oracle("llama"), random.Random(2)
    assert _totals(llm)["num_host_blocks"] == 4
    with Choreography(llm) as c:
        tokens = [random_tokens(rng, 64) for _ in range(3)]
        docs = c.prefill([{"tokens": t} for t in tokens])
        large = c.prefill(random_tokens(rng, 200))
        c.evict(*docs, large)  # the first is pushed out by the third; the large one never fits
        assert _totals(llm)["num_host_blocks_used"] == 4
        answer = c.decode([5, 6], parents=docs, sampling_params=_params(4))
        parents = [whole(oracle.encode(t), 64 * i) for i, t in enumerate(tokens)]
        assert_greedy(answer, oracle, parents, 192)
        totals = _totals(llm)
        assert totals["restored_messages_total"] == 2
        assert totals["encoded_again_messages_total"] == 1
        c.decode([5], parents=[large], sampling_params=_params(2))
        assert _totals(llm)["encoded_again_messages_total"] == 2


def test_a_tenant_over_its_share_makes_room_itself(start: Callable[..., Any]) -> None:
    llm = start(tenant_share=0.5)  # 10 of 20 blocks
    rng = random.Random(3)
    with Choreography(llm, tenant="a") as a, Choreography(llm, tenant="b") as b:
        kept = b.prefill([{"tokens": random_tokens(rng, 64)} for _ in range(4)])
        for _ in range(12):
            newest = a.prefill(random_tokens(rng, 64))
        assert all(_resident(b)[message.id] for message in kept)
        resident = [message_id for message_id, is_there in _resident(a).items() if is_there]
        assert 4 <= len(resident) <= 6 and newest.id in resident


def test_pinned_messages_are_evicted_last(start: Callable[..., Any]) -> None:
    llm = start(pinned_share=0.3)  # 6 of 20 blocks
    rng = random.Random(4)
    with Choreography(llm) as c:
        pinned = c.prefill([{"tokens": random_tokens(rng, 64)} for _ in range(3)])
        c.pin(*pinned, ttl=3600)
        c.pin(*pinned)  # once more changes nothing
        with pytest.raises(LimitError, match="pinned_share"):
            c.pin(c.prefill(random_tokens(rng, 40)))
        for _ in range(20):
            c.prefill(random_tokens(rng, 64))
        assert all(_resident(c)[message.id] for message in pinned)
        assert c.stats()["num_pinned"] == 3
        # What needs all of the pool gets it.
        large = c.prefill(random_tokens(rng, 600))
        assert _resident(c)[large.id] and sum(_resident(c)[m.id] for m in pinned) <= 1
        c.decode([5], parents=pinned, sampling_params=_params(2))
        c.unpin(*pinned[1:])
        c.pin(pinned[0], ttl=0.01)
        time.sleep(0.02)
        assert c.stats()["num_pinned"] == 0
        for _ in range(20):
            c.prefill(random_tokens(rng, 64))
        assert not any(_resident(c)[message.id] for message in pinned)

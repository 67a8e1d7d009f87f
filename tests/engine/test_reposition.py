# SPDX-License-Identifier: Apache-2.0
"""The policy that moves keys: the same results as rotating queries, and balanced blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from vllm_choreo import Choreography

IN_PLACE = {"additional_config": {"choreo": {"reposition": "in_place"}}}


@pytest.fixture
def llm(tiny_model_path: Callable[[str], Path]) -> Any:
    from tests.engine.engines import start_engine, stop_engine

    engine = start_engine(tiny_model_path("llama"), **IN_PLACE)
    yield engine
    stop_engine(engine)


def test_moved_keys_equal_the_oracle(llm: Any, tiny_oracle: Callable[[str], Oracle]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    oracle, rng = tiny_oracle("llama"), random.Random(7)
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        a, b = c.prefill(random_tokens(rng, 50)), c.prefill(random_tokens(rng, 40))
        oracle_a, oracle_b = oracle.encode(a.token_ids), oracle.encode(b.token_ids)
        for _ in range(6):  # one after another: moved in place, again and again
            at, bt = rng.randrange(300), rng.randrange(300)
            answer = c.decode(
                [5], parents=[a, b], offsets=[at, bt], new_offset=200, sampling_params=params
            )
            parents = [whole(oracle_a, at), whole(oracle_b, bt)]
            assert_greedy(answer, oracle, parents, 200)
        positions = {m["id"]: m["stored_position"] for m in c.stats()["messages"]}
        assert positions[a.id] != 0 and positions[b.id] != 0
        # At once, at several places: all but one read copies.
        offsets = [rng.randrange(300) for _ in range(5)]
        calls = [
            {"header": [6], "parents": [a, (b, 7, 35)], "offsets": [x, 250], "new_offset": 100}
            for x in offsets
        ]
        for answer, x in zip(c.decode(calls, sampling_params=params), offsets, strict=True):
            parents = [whole(oracle_a, x), Parent(oracle_b, 250, 7, 35)]
            assert_greedy(answer, oracle, parents, 100)
        # One message twice in one call.
        answer = c.decode([8], parents=[a, a], offsets=[0, 90], sampling_params=params)
        assert_greedy(answer, oracle, [whole(oracle_a, 0), whole(oracle_a, 90)], 140)
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free


def test_unknown_setting_is_refused(tiny_model_path: Callable[[str], Path]) -> None:
    from tests.engine.engines import start_engine

    with pytest.raises(ValueError, match="repositon"):
        start_engine(
            tiny_model_path("llama"), additional_config={"choreo": {"repositon": "in_place"}}
        )

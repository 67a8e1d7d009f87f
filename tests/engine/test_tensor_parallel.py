# SPDX-License-Identifier: Apache-2.0
"""Heads shared out among two workers: the results are those of one.

Each worker holds its heads' part of every block and runs the same plan. With fewer KV heads than
workers vLLM gives both a copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography
from tests.engine.engines import BLOCK_SIZE, start_engine, stop_engine
from tests.engine.oracle import Oracle, random_tokens
from vllm_choreo import Choreography
from vllm_choreo.engine import utility
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.models.tiny import TINY_MODELS, TinyModel, make_tiny_model

# The smallest pool in which vLLM has room for one sequence of the greatest length, 2,048 tokens.
POOL_BLOCKS = 66
# 3 layers, 32 slots, keys and values of 32 float32 numbers: of one KV head.
HEAD_BLOCK_GIB = 3 * BLOCK_SIZE * 2 * 32 * 4 / 2**30
# Sums over heads in another order.
LOGPROB_TOLERANCE = 2e-4


def _one_kv_head() -> transformers.PretrainedConfig:
    config = TINY_MODELS["llama"].config()
    config.num_key_value_heads = 1
    return config


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    model = TinyModel("one_kv_head", _one_kv_head, "fewer KV heads than workers")
    folder = tmp_path_factory.mktemp("tensor_parallel")

    def path(name: str) -> Path:
        with patch.dict(TINY_MODELS, {model.name: model}):
            return make_tiny_model(name, folder)

    return path


@contextmanager
def _engine(path: Path, num_workers: int, settings: dict[str, Any]) -> Iterator[Any]:
    llm = start_engine(
        path,
        tensor_parallel_size=num_workers,
        num_gpu_blocks_override=POOL_BLOCKS,
        additional_config={"choreo": settings},
    )
    try:
        yield llm
    finally:
        stop_engine(llm)


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=3)


def _debates(llm: Any, settings: dict[str, Any]) -> list[Message]:
    """Readers of shared messages at places of their own, more messages than the pool holds."""
    rng = random.Random(11)
    before = _totals(llm)
    answers: list[Message] = []
    with Choreography(llm) as c:
        docs = [c.prefill(random_tokens(rng, rng.randrange(40, 96))) for _ in range(40)]
        for _ in range(8):
            chosen = rng.sample(docs, 3)
            calls = [
                {
                    "header": random_tokens(rng, 3),
                    "parents": [*chosen, (answers[-1], 1, 4)] if answers else chosen,
                    "offsets": [rng.randrange(300) for _ in range(4 if answers else 3)],
                    "new_offset": 300,
                }
                for _ in range(3)
            ]
            answers += c.decode(calls, sampling_params=_params(5))
        c.evict(*docs[:5], answers[-1])
        answers.append(c.decode([5, 6], parents=[docs[0], answers[-1]], sampling_params=_params(5)))
        if "hidden_memory_gib" in settings:
            kept = [c.prefill(random_tokens(rng, 40), keep_hidden=[1]) for _ in range(3)]
            partly: list[dict[str, Any]] = [
                {"layers": (1, 3)},
                {"repair": {"share": 0.5, "by": "attention"}},
            ]
            for named in partly:
                answers.append(c.decode([5, 6], parents=kept, sampling_params=_params(5), **named))
                assert answers[-1].usage.repaired_tokens
    after = _totals(llm)

    def gained(name: str) -> int:
        count: int = after[name] - before.get(name, 0)
        return count

    if "host_memory_gib" in settings:
        assert gained("restored_messages_total") > 2
    assert gained("encoded_again_messages_total") > 2
    assert after["num_free_blocks"] == POOL_BLOCKS - 1
    return answers


def _totals(llm: Any) -> dict[str, Any]:
    totals: dict[str, Any] = utility.call(llm, "totals")
    return totals


def _assert_equal(found: Sequence[Message], expected: Sequence[Message]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.usage == theirs.usage
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            for token_id in one.keys() & other.keys():
                difference = one[token_id].logprob - other[token_id].logprob
                assert abs(difference) < LOGPROB_TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {"host_memory_gib": 24.5 * HEAD_BLOCK_GIB, "hidden_memory_gib": 0.01}),
        pytest.param("one_kv_head", {"reposition": "in_place"}, marks=pytest.mark.exhaustive),
    ],
    ids=["query rotated, host memory", "one KV head, keys moved in place"],
)
def test_two_workers_equal_one(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # per worker
    path = model_path(model)
    oracle = Oracle(path)
    with _engine(path, 2, settings) as llm:
        found = _debates(llm, settings)
        first, second = llm.collective_rpc("choreo_positions")
        assert [layer["longest_wavelength"] for layer in first] == [
            layer["longest_wavelength"] for layer in second
        ]
        if "host_memory_gib" in settings:  # per worker, whose blocks are half as large
            assert _totals(llm)["num_host_blocks"] == 24
        for seed in range(3):
            with Choreography(llm) as c:
                check(c, oracle, draw_choreography(seed))
    with _engine(path, 1, settings) as llm:
        if "host_memory_gib" in settings:
            assert _totals(llm)["num_host_blocks"] == 12
        _assert_equal(found, _debates(llm, settings))

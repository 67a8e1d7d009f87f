# SPDX-License-Identifier: Apache-2.0
"""The oracle of models with states against plain forward passes. No engine, no project code."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.oracle import Parent, random_tokens, whole
from tests.engine.state_oracle import StateEncoded, StateOracle

# Two float32 evaluations of the same thing in another order; measured at most 3e-5.
SELF_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["granite_hybrid", "lfm2", "qwen3_next"])
def path(request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path]) -> Path:
    return tiny_model_path(request.param)


@pytest.fixture(scope="module")
def oracle(path: Path) -> StateOracle:
    return StateOracle(path)


def _far(one: StateEncoded, rows: torch.Tensor) -> float:
    return float((one.logprobs() - rows).abs().max())


def _chain(oracle: StateOracle, texts: list[list[int]]) -> list[Parent]:
    chain: list[Parent] = []
    for text in texts:
        position = sum(len(parent.message) for parent in chain)
        chain.append(whole(oracle.encode(text, chain, position), position))
    return chain


def test_a_composed_chain_is_the_text(oracle: StateOracle) -> None:
    """Nothing of a chain's own states is used but what its messages do to any state."""
    rng = random.Random(0)
    texts = [random_tokens(rng, n) for n in (7, 1, 2, 20)]
    chain = _chain(oracle, texts)
    text = [token for part in texts for token in part]
    plain = oracle.plain_logits(text).log_softmax(-1)
    last = chain[-1].message
    assert isinstance(last, StateEncoded)
    assert _far(last, plain[-20:]) < SELF_TOLERANCE


def test_tokens_one_by_one_give_the_same(path: Path, oracle: StateOracle) -> None:
    rng, steps = random.Random(1), StateOracle(path, in_steps=True)
    texts = [random_tokens(rng, n) for n in (9, 1, 5)]
    read = [[], [0], []]
    found = []
    for one in (oracle, steps):
        made: list[StateEncoded] = []
        for text, parents in zip(texts, read, strict=True):
            made.append(one.encode(text, [whole(made[p], 0) for p in parents], 40))
        order = [whole(made[2], 7), whole(made[1], 3), whole(made[2], 30)]
        found.append(one.encode(random_tokens(random.Random(2), 6), order, 12))
    assert _far(found[0], found[1].logprobs()) < SELF_TOLERANCE


def test_another_order_is_another_result(oracle: StateOracle) -> None:
    rng = random.Random(3)
    one, other = (oracle.encode(random_tokens(rng, 12)) for _ in range(2))
    tokens = random_tokens(rng, 4)
    found = [
        oracle.encode(tokens, [whole(a, at), whole(b, 12 - at)], 24)
        for a, b, at in ((one, other, 0), (other, one, 12))
    ]
    assert _far(found[0], found[1].logprobs()) > 1e-2

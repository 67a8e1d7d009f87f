# SPDX-License-Identifier: Apache-2.0
"""Random choreographies on the real engine in float32, against the dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import Draw, check, draw_choreography
from tests.engine.oracle import Oracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.smallmodel.tiny import TINY_MODELS

_NUM_SEEDS = 21  # times 10 architectures: 210 choreographies
_NUM_LOCAL = 60  # times 7 architectures in which not every token sees alike: 420 more
# Windows are of 8 to 24 tokens.
_NEAR = Draw(max_tokens=8, max_length=40)
_NUM_EMBEDDED = 12
# The embedded model costs a thousand times as much a token as the tiny ones.
_EMBEDDED = Draw(num_batches=2, max_tokens=3, max_length=40, token_ids=(20, 49000))


# Sliding windows; queries scaled by position; rows of positions.
_LOCAL = [
    *sorted(name for name, model in TINY_MODELS.items() if model.is_local),
    *("ministral3", "paddleocr_vl"),
]


@pytest.fixture(scope="module", params=sorted({*TINY_MODELS} - {*_LOCAL}))
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    """Engine and oracle of each tiny model in turn."""
    return engine_slot(tiny_model_path(request.param)), tiny_oracle(request.param)


@pytest.fixture(scope="module", params=_LOCAL)
def local(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    """Engine and oracle of each of `_LOCAL` in turn."""
    return engine_slot(tiny_model_path(request.param)), tiny_oracle(request.param)


@pytest.fixture(scope="module")
def embedded(engine_slot: Callable[..., Any], embedded_model_path: Path) -> tuple[Any, Oracle]:
    """Engine and oracle of the embedded model."""
    return engine_slot(embedded_model_path), Oracle(embedded_model_path)


@pytest.mark.parametrize("seed", sampled(range(_NUM_SEEDS), 3))
def test_tiny(tiny: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = tiny
    with Choreography(llm) as choreography:
        check(choreography, oracle, draw_choreography(seed))


@pytest.mark.parametrize("seed", sampled(range(3000, 3000 + _NUM_LOCAL), 2))
def test_windows(local: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = local
    with Choreography(llm) as choreography:
        check(choreography, oracle, draw_choreography(seed, _NEAR))


@pytest.mark.parametrize("seed", sampled(range(1000, 1000 + _NUM_EMBEDDED), 2))
def test_embedded(embedded: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = embedded
    with Choreography(llm) as choreography:
        check(choreography, oracle, draw_choreography(seed, _EMBEDDED))

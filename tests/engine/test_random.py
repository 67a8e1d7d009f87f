# SPDX-License-Identifier: Apache-2.0
"""Random choreographies on the real engine in float32, against the dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import Draw, check, draw_choreography, side_by_side
from tests.engine.oracle import Oracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.testing.models.tiny import TINY_MODELS

# Each group of seeds is a test: its choreographies run side by side in one session.
_SEEDS = [range(3), range(3, 12), range(12, 21)]  # for each of 12 architectures
# For each of 7 architectures in which not every token sees alike.
_LOCAL_SEEDS = [range(3000, 3002), *(range(first, first + 10) for first in range(3002, 3062, 10))]
# Windows are of 8 to 24 tokens.
_NEAR = Draw(max_tokens=8, max_length=40)
_EMBEDDED_SEEDS = [range(1000, 1002), range(1002, 1008)]
# The embedded model costs a thousand times as much a token as the tiny ones.
_EMBEDDED = Draw(num_batches=2, max_tokens=3, max_length=40, token_ids=(20, 49000))


# Queries scaled by position; sliding windows; rows of positions.
_LOCAL = [
    "gpt_oss",
    "ministral3",
    *sorted(name for name, model in TINY_MODELS.items() if model.is_local and name != "gpt_oss"),
    "paddleocr_vl",
]
# Those whose attention is unlike the others' come first.
_UNLIKE = ["llama", "bloom", "glm4", "smollm3", "deepseek_v3"]
_GLOBAL = [*_UNLIKE, *sorted({*TINY_MODELS} - {*_LOCAL, *_UNLIKE})]


@pytest.fixture(scope="module", params=sampled(_GLOBAL, len(_UNLIKE)))
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    """Engine and oracle of each tiny model in turn."""
    return engine_slot(tiny_model_path(request.param)), tiny_oracle(request.param)


@pytest.fixture(scope="module", params=sampled(_LOCAL, 4))
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


def _check_all(engine: tuple[Any, Oracle], seeds: range, draw: Draw | None = None) -> None:
    llm, oracle = engine
    with Choreography(llm) as choreography:
        drawn = [draw_choreography(seed, draw) for seed in seeds]
        check(choreography, oracle, side_by_side(drawn))


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_tiny(tiny: tuple[Any, Oracle], seeds: range) -> None:
    _check_all(tiny, seeds)


@pytest.mark.parametrize("seeds", sampled(_LOCAL_SEEDS, 1), ids=str)
def test_windows(local: tuple[Any, Oracle], seeds: range) -> None:
    _check_all(local, seeds, _NEAR)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", _EMBEDDED_SEEDS, ids=str)
def test_embedded(embedded: tuple[Any, Oracle], seeds: range) -> None:
    _check_all(embedded, seeds, _EMBEDDED)

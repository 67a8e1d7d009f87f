# SPDX-License-Identifier: Apache-2.0
"""Models with states that read messages in any order, against the oracle that composes states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.choreographies import Draw, check, draw_choreography, side_by_side
from tests.engine.feature_machine import invariants
from tests.engine.state_oracle import StateOracle
from tests.engine.test_states import OPTIONS
from tests.grids import sampled
from vllm_choreo import Choreography

MODELS = ["granite_hybrid", "lfm2"]
_DRAW = Draw(has_parts=False)


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> StateOracle:
    return StateOracle(tiny_model_path(name))


@pytest.fixture
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    choreo = {"composed_states": True, "tokens_per_state": 128}
    options = {**OPTIONS.get(name, {}), "additional_config": {"choreo": choreo}}
    return engine_slot(tiny_model_path(name), **options)


@pytest.mark.parametrize("seeds", sampled([range(3), *(range(a, a + 10) for a in range(3, 103, 10))], 1), ids=str)
def test_random_choreographies(llm: Any, oracle: StateOracle, seeds: range) -> None:
    """Any order, duplicates, gaps and negative distances, behind generated messages, too."""
    with Choreography(llm) as choreography:
        drawn = [draw_choreography(seed, _DRAW) for seed in seeds]
        check(choreography, oracle, side_by_side(drawn))

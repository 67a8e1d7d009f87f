# SPDX-License-Identifier: Apache-2.0
"""Engines of tiny models with states, for the tests of these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.engine.feature_machine.configurations import Configuration, scheduling_of

MODELS = ["granite_hybrid", "lfm2"]
LITTLE_ROOM = {"num_gpu_blocks_override": 25, "max_model_len": 24 * 32}
_ASYNC = Configuration("", frozenset({"async"}), 25)


def scheduler_of(llm: Any) -> Any:
    """Our scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def small_engine(
    engine_slot: Callable[..., Any],
    path: Path,
    choreo: dict[str, Any],
    *,
    is_async: bool,
    **options: Any,
) -> Any:
    """Engine of 24 blocks, with asynchronous scheduling or without."""
    options |= {**LITTLE_ROOM, "additional_config": {"choreo": choreo}}
    with scheduling_of(_ASYNC) if is_async else nullcontext():
        llm = engine_slot(path, **options)
    assert scheduler_of(llm).scheduler_config.async_scheduling == is_async
    return llm

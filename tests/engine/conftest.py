# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests: tiny models on disk, their oracles, engines in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

# vLLM reads this when it starts an engine: without binding, engines of test runs beside one another
# (and other work on the machine) are not all pinned to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest
import torch

from tests.engine.engines import SLOT
from tests.engine.oracle import Oracle
from tests.selection import SHARES_NEXT
from vllm_choreo.testing.models.embedded import default_path, is_complete

if TYPE_CHECKING:
    from vllm import LLM

    from tests.engine.feature_machine.machine import Machine

# Whoever wants such a model has made its folder: none is ever fetched for a test.
_TESTS_OF_MODELS = {
    "gemma3-270m": "test_gemma3_270m.py",
    "qwen2.5-coder-0.5b": "test_qwen25_coder.py",
}
collect_ignore = [
    file for name, file in _TESTS_OF_MODELS.items() if not is_complete(default_path(name), name)
]


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model_path: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """`tiny_oracle(name)`: the dense oracle of a tiny model, made on first use."""
    return cache(lambda name: Oracle(tiny_model_path(name)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tiny models' matrices are small: on a busy machine two threads, each waiting for the
    other to be scheduled, took 60 times as long as one.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine_slot(request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """`engine_slot(model_path, **options)`: the module's one engine, started on first use.

    Asking for another model or other options stops the engine before it starts the new one, so
    order parametrised tests by model. It stays for the next module, emptied, if that runs in this
    process because it asks for the same one: see `plain_llama`.
    """
    yield SLOT.take
    if request.config.stash[SHARES_NEXT]:
        SLOT.clear()
    else:
        SLOT.stop()


@pytest.fixture(scope="module")
def machine_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Machine]]:
    """`machine_of(name)`: a random machine of that configuration; so order tests by it."""
    from tests.engine.feature_machine.soak import Engines

    engines = Engines(tmp_path_factory.mktemp("machine"))
    yield engines.of
    engines.stop()


@pytest.fixture
def plain_llama(engine_slot: Callable[..., LLM], tiny_model_path: Callable[[str], Path]) -> LLM:
    """An engine of the tiny Llama as it is by default. Files that ask for it run one after
    another, and share it.
    """
    return engine_slot(tiny_model_path("llama"))

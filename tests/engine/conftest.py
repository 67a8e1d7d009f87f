# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests: tiny models on disk, their oracles, engines in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

# vLLM reads this when it starts an engine: without binding, engines of test runs beside one another
# (and other work on the machine) are not all pinned to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest
import torch

from tests.engine import fp8_kernels
from tests.engine.oracle import Oracle
from tests.quick import NUM_BLOCKS
from tests.selection import SHARES_NEXT
from vllm_choreo.testing.models.embedded import default_path, is_complete
from vllm_choreo.testing.models.tiny import MAX_MODEL_LEN

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_SIZE = 32
_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "language_model_only": True,  # of models that take pictures, which have no processor here
    "seed": 0,
}

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


def start_engine(model_path: Path, **options: Any) -> LLM:
    """An engine in this process; `options` override the defaults of the tests.

    Chunks of 256 tokens, so that longer prompts are prefilled in several steps.
    """
    from vllm import LLM

    if options.get("kv_cache_dtype", "auto") != "auto":
        fp8_kernels.install_where_missing()
    return LLM(str(model_path), **{**_OPTIONS, **options})


def stop_engine(llm: LLM) -> None:
    """Shut `llm` down now.

    vLLM's process groups are global: an engine that is collected later would take down those of
    the engine that was started after it.
    """
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tiny models' matrices are small: on a busy machine two threads, each waiting for the
    other to be scheduled, took 60 times as long as one.
    """
    torch.set_num_threads(1)


class _Slot:
    """The engine of this process, of which there is one at a time."""

    def __init__(self) -> None:
        self._key: tuple[Path, str] | None = None
        self._llm: LLM | None = None

    def take(self, model_path: Path, **options: Any) -> LLM:
        key = (model_path, repr(sorted({**_OPTIONS, **options}.items())))
        if self._llm is None or self._key != key:
            self.stop()
            self._llm, self._key = start_engine(model_path, **options), key
        return self._llm

    def clear(self) -> None:
        """Let nobody find what was computed until now."""
        if self._llm is not None:
            assert self._llm.reset_prefix_cache(), "a test has left something"

    def stop(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            stop_engine(llm)


@pytest.fixture(scope="session")
def _slot() -> Iterator[_Slot]:
    slot = _Slot()
    yield slot
    slot.stop()


@pytest.fixture(scope="module")
def engine_slot(_slot: _Slot, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """`engine_slot(model_path, **options)`: the module's one engine, started on first use.

    Asking for another model or other options stops the engine before it starts the new one, so
    order parametrised tests by model. It stays for the next module, emptied, if that runs in this
    process because it asks for the same one: see `plain_llama`.
    """
    yield _slot.take
    if request.config.stash[SHARES_NEXT]:
        _slot.clear()
    else:
        _slot.stop()


@pytest.fixture
def plain_llama(engine_slot: Callable[..., LLM], tiny_model_path: Callable[[str], Path]) -> LLM:
    """An engine of the tiny Llama as it is by default. Files that ask for it run one after
    another, and share it.
    """
    return engine_slot(tiny_model_path("llama"))

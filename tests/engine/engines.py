# SPDX-License-Identifier: Apache-2.0
"""Engines in the process of the tests: how they start and stop, and the one that files share."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import fp8_kernels
from tests.quick import NUM_BLOCKS
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


class _Slot:
    """The engine of this process, of which there is one at a time."""

    def __init__(self) -> None:
        self._key: tuple[Path, str] | None = None
        self._llm: LLM | None = None

    def take(self, model_path: Path, **options: Any) -> LLM:
        from vllm.distributed.parallel_state import model_parallel_is_initialized

        if not model_parallel_is_initialized():
            self.stop()  # another engine ended, and took the process's groups with it
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


SLOT = _Slot()

# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process, and fixtures that several folders of tests use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.quick import freeze_what_is_imported, shallow_copy
from tests.selection import (  # noqa: F401  hooks of pytest
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_xdist_make_scheduler,
)

# Processes of pytest-xdist share the cores.
_NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_NUM_THREADS = max(1, min(2, (os.cpu_count() or 1) // _NUM_PROCESSES))
# vLLM and OpenMP read these when they are imported, hence before any test module is.
# A value that is set already wins, so that a run can be changed from outside.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: 6 s instead of 45 s
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; enough for about 23,000 tokens of the embedded model
    # Seconds; a server may close an idle connection while the next request is on its way.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    # On GPUs vLLM's Triton attention would round the factors of its products to 10 bits (TF32), and
    # be further from the oracle than float32's tolerance allows.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # a test that needs the network must fail at once, everywhere
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": str(_NUM_THREADS),
    # vLLM's n-grams run in numba, which gives torch, too, as many threads as it has itself.
    "NUMBA_NUM_THREADS": str(_NUM_THREADS),
    # Where programs keep the key of what they save: not among this user's own.
    "XDG_CONFIG_HOME": str(Path(tempfile.gettempdir()) / f"vllm-choreo-tests-{os.getuid()}"),
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
if not torch.cuda.is_available():
    # Read when Triton is first imported: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    freeze_what_is_imported()


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """Folder of SmolLM2-135M-Instruct (float32); made in the user's cache at the first use."""
    from vllm_choreo.testing.models.embedded import embedded_model

    return embedded_model(progress=False)


@pytest.fixture(scope="session")
def shallow_model_path(embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's first two layers: its tokenizer, chat template and shapes, but no sense.

    For tests of whatever goes around a model; a token costs a fifth of the whole model's.
    """
    folder = tmp_path_factory.mktemp("models") / "shallow"
    return shallow_copy(embedded_model_path, folder)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_path(name)`: the folder of a tiny random model, written on first use."""
    from vllm_choreo.testing.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny_models")
    return cache(lambda name: make_tiny_model(name, folder))

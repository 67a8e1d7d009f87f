# SPDX-License-Identifier: Apache-2.0
"""Tests on vLLM's model runner V2, run on CPU: `python -m tests.engine.interpreted_tests ...`.

Arguments are pytest's. Engines schedule asynchronously, as they do by default on GPUs; their
attention is that of CPUs, and all else of the runner runs in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

import pytest

from tests.engine.interpreted import pretend_triton_for_cpu


def run_v2_on_cpu() -> None:
    """Before vLLM is imported: engines of this process take model runner V2."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    pretend_triton_for_cpu()


class _Asynchronous:
    """Plugin of pytest that has engines schedule asynchronously."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def pytest_collection_finish(self) -> None:
        from tests.engine.scheduling import asynchronous_scheduling

        self._stack.enter_context(asynchronous_scheduling())


def main(arguments: list[str]) -> int:
    run_v2_on_cpu()
    with ExitStack() as stack:
        return int(pytest.main(["--all", *arguments], plugins=[_Asynchronous(stack)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

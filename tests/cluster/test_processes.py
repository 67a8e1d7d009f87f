# SPDX-License-Identifier: Apache-2.0
"""An engine's core in a process of its own, as on GPUs: it ends, and its replica does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.cluster.conftest import Fleet, streamed

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]  # processes of their own

_WORDS = [" ".join(f"t{(7 * i + j) % 400 + 20}" for i in range(40)) for j in range(2)]


def _core(fleet: Fleet) -> psutil.Process:
    """The process of the one engine's core; waited for."""
    deadline = time.monotonic() + 300
    while True:
        for replica in fleet.replicas("engine"):
            for process in replica.children(recursive=True):
                if "EngineCore" in " ".join(process.cmdline()):
                    return process
        assert time.monotonic() < deadline, "no engine has a process"
        time.sleep(0.2)


def test_a_core_and_its_replica_end(start_fleet: Callable[..., Fleet]) -> None:
    fleet = start_fleet(engines=1, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})

    async def main() -> None:
        async with fleet.async_client() as c:
            facts = await c.prefill([{"tokens": text} for text in _WORDS])
            before = await streamed(c, facts, lambda: None)
            assert await streamed(c, facts, lambda: _core(fleet).kill()) == before
            core = _core(fleet)
            os.kill(core.ppid(), signal.SIGKILL)
            core.wait(60)  # else it would have its memory for ever
            assert await streamed(c, facts, lambda: None) == before

    asyncio.run(main())

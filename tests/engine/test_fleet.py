# SPDX-License-Identifier: Apache-2.0
"""Sessions over several engines: the answers of one, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import start_engine, stop_engine
from tests.engine.workflows import draw_workflow, facts, run
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.engine.fleet_client import FleetClient

NUM_WORKFLOWS = int(os.environ.get("CHOREO_FLEET_WORKFLOWS", "10"))


@pytest.fixture(scope="module")
def model_path(tiny_model_path: Callable[[str], Path]) -> Path:
    return tiny_model_path("llama")


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[list[Any]]:
    """What one engine in this process makes of the workflows."""
    llm = start_engine(model_path)
    found = []
    for seed in range(NUM_WORKFLOWS):
        with Choreography(llm) as c:
            steps = draw_workflow(random.Random(seed))
            found.append(list(facts(asyncio.run(run(c, steps)))))
    stop_engine(llm)
    return found


@asynccontextmanager
async def started(model_path: Path, num_engines: int) -> AsyncIterator[Any]:
    """An AsyncLLM of several engines, each one process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        str(model_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=256,
        max_num_batched_tokens=256,
        data_parallel_size=num_engines,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    try:
        assert type(llm.engine_core) is FleetClient
        yield llm
    finally:
        llm.shutdown()


def kill(client: FleetClient, engine: int) -> None:
    """End an engine's process as nothing else would."""
    (process,) = client.clients[engine].resources.engine_manager.processes
    os.kill(process.pid, signal.SIGKILL)


class Killer:
    """Ends an engine at random steps, if all run.

    Attributes:
        num_killed: engines that were ended.
    """

    def __init__(self, client: FleetClient, rng: random.Random, share: float) -> None:
        self.client, self.rng, self.share = client, rng, share
        self._killed: set[tuple[int, int]] = set()  # an engine's end is not seen at once

    def __call__(self) -> None:
        alive = self.client.alive
        if len(alive) == self.client.num_engines and self.rng.random() < self.share:
            engine = self.rng.choice(alive)
            kill(self.client, engine)
            self._killed.add((engine, self.client.starts[engine]))

    @property
    def num_killed(self) -> int:
        return len(self._killed)

    async def until_all_run(self) -> None:
        while len(self.client.alive) < self.client.num_engines:
            await asyncio.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_engines", [2, 3])
def test_answers_are_those_of_one_engine_whatever_ends(
    num_engines: int, model_path: Path, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no worker process besides

    async def workflow(llm: Any, seed: int, killer: Killer | None) -> list[Any]:
        async with AsyncChoreography(llm, tenant=f"t{seed % 3}") as c:
            return list(facts(await run(c, draw_workflow(random.Random(seed)), killer)))

    async def main() -> None:
        async with started(model_path, num_engines) as llm:
            client = llm.engine_core
            half = NUM_WORKFLOWS // 2
            found = await asyncio.gather(*(workflow(llm, s, None) for s in range(half)))
            assert found == expected[:half]
            killer = Killer(client, random.Random(num_engines), 0.1)
            for first in range(half, NUM_WORKFLOWS, 5):
                await killer.until_all_run()
                rest = range(first, min(first + 5, NUM_WORKFLOWS))
                found = await asyncio.gather(*(workflow(llm, seed, killer) for seed in rest))
                assert found == expected[first : rest.stop]
            await killer.until_all_run()
            assert killer.num_killed == sum(client.starts) - num_engines > 0
            await nothing_is_left(llm)

    asyncio.run(main())


async def nothing_is_left(llm: Any) -> None:
    """No engine has a message, or a block, of sessions that are closed."""
    from vllm_choreo.engine.utility import call_engine

    for engine in llm.engine_core.alive:
        totals = await call_engine(llm, engine, "totals")
        assert totals["num_messages"] == totals["num_blocks"] == totals["num_calls"] == 0

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

from tests.engine.engines import start_engine, stop_engine
from tests.engine.pictured import OPTIONS as PICTURE_OPTIONS
from tests.engine.pictured import picture
from tests.engine.workflows import draw_workflow, facts, greedy, run
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.engine.fleet_client import FleetClient
from vllm_choreo.fleet.placement import Rates
from vllm_choreo.testing.models.pictured import PICTURED_MODELS

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
async def started(model_path: Path, num_engines: int, **options: Any) -> AsyncIterator[Any]:
    """An AsyncLLM of several engines, each one process, with other options of vLLM's."""
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
        **options,
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
    """Moves cost nothing here, so whatever lies elsewhere, and is longer than a block, is moved."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no worker process besides

    async def workflow(llm: Any, seed: int, killer: Killer | None) -> list[Any]:
        async with AsyncChoreography(llm, tenant=f"t{seed % 3}") as c:
            return list(facts(await run(c, draw_workflow(random.Random(seed)), killer)))

    async def main() -> None:
        async with started(model_path, num_engines) as llm:
            client, fleet = llm.engine_core, fleet_of(llm)
            assert fleet is not None
            monkeypatch.setattr(fleet.measured, "rates", lambda: Rates(encode=1e-3, move=0.0))
            half = NUM_WORKFLOWS // 2
            found = await asyncio.gather(*(workflow(llm, s, None) for s in range(half)))
            assert found == expected[:half]
            assert fleet.mover.total.moved > 0 and fleet.mover.total.bytes > 0
            killer = Killer(client, random.Random(num_engines), 0.1)
            for first in range(half, NUM_WORKFLOWS, 5):
                await killer.until_all_run()
                rest = range(first, min(first + 5, NUM_WORKFLOWS))
                found = await asyncio.gather(*(workflow(llm, seed, killer) for seed in rest))
                assert found == expected[first : rest.stop]
            await killer.until_all_run()
            assert killer.num_killed == sum(client.starts) - num_engines > 0
            await nothing_is_left(llm)
            assert not list(fleet.mover.transfer.files.folder.iterdir())

    asyncio.run(main())


async def nothing_is_left(llm: Any) -> None:
    """No engine has a message, or a block, of sessions that are closed."""
    from vllm_choreo.engine.utility import call_engine

    for engine in llm.engine_core.alive:
        totals = await call_engine(llm, engine, "totals")
        assert totals["num_messages"] == totals["num_blocks"] == totals["num_calls"] == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "has_workers"),
    [("llama", False), ("llama", True), ("gemma3", False), ("granite_hybrid", False)],
)
def test_what_is_moved_is_not_encoded(
    name: str,
    has_workers: bool,
    tiny_model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where layers with windows have blocks of their own, and where layers have states.

    Workers are processes, as `vllm serve` has them on CPUs, or in the core's.
    """
    model_path = tiny_model_path(name)
    choreo = {"choreo": {"window_groups": name == "gemma3"}}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(has_workers)))
    tokens = [[7 + 11 * n + i % 300 for i in range(200)] for n in range(3)]
    header = [5, 6, 7]

    async def main() -> None:
        async with started(model_path, 2, additional_config=choreo) as llm:
            fleet = fleet_of(llm)
            assert fleet is not None
            rates = Rates(encode=1e-3, move=0.0)
            monkeypatch.setattr(fleet.measured, "rates", lambda: rates)
            async with AsyncChoreography(llm, tenant="a") as c:
                fleet.loads.add(1, 1e3)  # moves cost nothing: what comes first goes to one engine
                chain = [await c.prefill(tokens[0])]
                chain.append(await c.prefill(tokens[1], parents=chain))
                chain.append(await c.prefill(tokens[2], parents=chain))
                (home,) = {e for m in chain for e in homes_of(c, m)}
                expected = await c.decode(header, parents=chain, sampling_params=greedy())
                assert expected.usage.exact
                fleet.loads.add(home, 1e6)  # what comes next goes to the other engine
                found = await c.decode(header, parents=chain, sampling_params=greedy())
                assert found.token_ids == expected.token_ids and found.usage.exact
                total = fleet.mover.total
                assert (total.moved, total.failed, total.tokens) == (3, 0, 600)
                assert sum(fleet.num_again) == 0
                assert homes_of(c, chain[0]) == {0, 1}
                # Another tenant's equal messages are moved for nobody else.
                async with AsyncChoreography(llm, tenant="b") as other:
                    same = await other.prefill(tokens[0])
                    await other.decode(header, parents=[same], sampling_params=greedy())
                assert fleet.mover.total.moved == 3
                # In the same tenant's session, what another session has made is moved.
                async with AsyncChoreography(llm, tenant="a") as later:
                    fleet.loads.add(1 - home, 2e6)
                    await later.prefill(tokens[0])
                    fleet.loads.add(home, 2e6)
                await move_fails(c, fleet, monkeypatch, expected)
            await nothing_is_left(llm)

    async def move_fails(c: Any, fleet: Any, monkeypatch: Any, expected: Any) -> None:
        """With no folder to go through, messages are encoded, and answers are the same."""
        again = await c.prefill([9, *tokens[1]])
        (home,) = homes_of(c, again)
        first = await c.decode(header, parents=[again], sampling_params=greedy())
        monkeypatch.setattr(fleet.mover.transfer.files, "folder", Path("/nowhere"))
        fleet.loads.add(home, 1e9)
        found = await c.decode(header, parents=[again], sampling_params=greedy())
        assert found.token_ids == first.token_ids
        assert fleet.mover.total.failed == 1 and sum(fleet.num_again) == 1

    asyncio.run(main())


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_session_of_two_engines_is_saved_and_loaded(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of both engines go into one folder; loaded, they outlive the engine they went to."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    header = [5, 6, 7]

    async def main() -> None:
        async with started(model_path, 2) as llm:
            fleet = fleet_of(llm)
            assert fleet is not None
            async with AsyncChoreography(llm) as c:
                a = await c.prefill([7 + i % 300 for i in range(200)])
                (home,) = homes_of(c, a)
                fleet.loads.add(home, 1e6)
                b = await c.prefill([9 + i % 200 for i in range(70)])
                assert homes_of(c, b) == {1 - home}
                lost = await c.prefill([8] * 40)
                d = await c.prefill([4] * 33, parents=[lost, a])
                await c.free(lost)
                expected = await c.decode(header, parents=[b, d, a], sampling_params=greedy())
                for encodings in (True, False):
                    saved = await c.save([a, b, d], tmp_path / f"{encodings}", encodings=encodings)
                    assert (saved.messages, saved.encodings) == (3, 3 * encodings)
            for encodings in (True, False):
                async with AsyncChoreography(llm) as later:
                    a, b, d = await later.load(tmp_path / f"{encodings}")
                    found = await later.decode(header, parents=[b, d, a], sampling_params=greedy())
                    assert found.token_ids == expected.token_ids
                    engine = later.engine_of(found)
                    assert engine is not None
                    kill(llm.engine_core, engine)
                    found = await later.decode(header, parents=[b, d, a], sampling_params=greedy())
                    assert found.token_ids == expected.token_ids
                    while len(fleet.alive) < 2:
                        await asyncio.sleep(0.1)
            await nothing_is_left(llm)

    asyncio.run(main())


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PICTURED_MODELS)
def test_pictures_are_shown_by_any_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved, encoded there again, after the end of the engine that had them, and loaded."""
    model_path = PICTURED_MODELS[name](tmp_path)
    # Longer than a block: what is shorter is not moved.
    words = " ".join(f"t{number}" for number in range(100, 140))
    texts = [f"{words} <image> t13", f"t60 <image> {words}", "t7 <image> t8 t9"]
    shown = [{"image": picture(seed)} for seed in range(3)]
    question = {"sampling_params": greedy(), "offsets": [90, 0]}
    llm = start_engine(model_path, **PICTURE_OPTIONS)
    with Choreography(llm) as c:
        chain: list[Any] = []
        for text, data in zip(texts[:2], shown, strict=False):
            chain.append(c.prefill(text, parents=list(chain), multi_modal_data=data))
        one = c.decode(texts[2], parents=chain, multi_modal_data=shown[2], **question)
        expected = [one, c.decode("t5 t6", parents=[one, chain[0]], **question)]
    stop_engine(llm)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    async def answer(c: AsyncChoreography, chain: list[Any]) -> int:
        """Ask; returns the engine of the last answer."""
        one = await c.decode(texts[2], parents=chain, multi_modal_data=shown[2], **question)
        other = await c.decode("t5 t6", parents=[one, chain[0]], **question)
        assert [one.token_ids, other.token_ids] == [m.token_ids for m in expected]
        engine = c.engine_of(other)
        assert engine is not None
        return engine

    async def move_or_encode(llm: Any, fleet: Any, tenant: str, move: float) -> None:
        monkeypatch.setattr(fleet.measured, "rates", lambda: Rates(encode=1e-3, move=move))
        moved, again = fleet.mover.total.moved, sum(fleet.num_again)
        async with AsyncChoreography(llm, tenant=tenant) as c:
            # Moves may cost nothing: what comes first goes to one engine.
            for engine, load in enumerate((0.0, 1e3)):
                fleet.loads.put(engine, load)
            chain: list[Any] = []
            for text, data in zip(texts[:2], shown, strict=False):
                made = await c.prefill(text, parents=list(chain), multi_modal_data=data)
                chain.append(made)
            home = await answer(c, chain)
            fleet.loads.add(home, 1e6)  # what comes next goes to the other engine
            assert await answer(c, chain) == 1 - home
            assert fleet.mover.total.failed == 0
            is_moved = fleet.mover.total.moved > moved
            assert (is_moved, sum(fleet.num_again) > again) == (move == 0.0, move > 0.0)
            kill(llm.engine_core, 1 - home)
            await answer(c, chain)
            while len(fleet.alive) < 2:
                await asyncio.sleep(0.1)
            saved = await c.save(chain, tmp_path / tenant, encodings=move == 0.0)
            assert saved.messages == 2
        async with AsyncChoreography(llm, tenant=tenant) as later:
            kill(llm.engine_core, await answer(later, await later.load(tmp_path / tenant)))
            while len(fleet.alive) < 2:
                await asyncio.sleep(0.1)

    async def main() -> None:
        async with started(model_path, 2, **PICTURE_OPTIONS) as llm:
            fleet = fleet_of(llm)
            await move_or_encode(llm, fleet, "a", 0.0)
            await move_or_encode(llm, fleet, "b", float("inf"))
            await nothing_is_left(llm)

    asyncio.run(main())


def homes_of(c: AsyncChoreography, message: Any) -> set[int]:
    """Engines where the front of a fleet believes a message to lie."""
    runner: Any = c._runner
    return set(runner._fleet.homes.of(runner._recipes[message.id].key))

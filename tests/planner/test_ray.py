# SPDX-License-Identifier: Apache-2.0
"""Workers of Ray's: the same answers, also when one of them is killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from tests.planner.graphs import RandomGraph
from vllm_choreo.errors import TooLongError
from vllm_choreo.planner import invoke, naive
from vllm_choreo.planner.logical.graph import CompiledGraph

pytest.importorskip("ray")

from vllm_choreo.planner.workers.ray import RayWorkers, ray_workers

pytestmark = pytest.mark.exhaustive  # processes of their own


class SlowFacade(AsyncDigestFacade):
    """Takes its time, so that it can be killed in the middle."""

    async def decode(self, header: Any, **options: Any) -> Any:
        import asyncio

        await asyncio.sleep(0.02)
        return await super().decode(header, **options)


def refuse_two(prompt: str, number: int) -> None:
    if "two" in prompt:
        raise TooLongError("too long", parameter="header", value=prompt)


def make() -> Any:
    return SlowFacade("choreo")


def make_refusing() -> Any:
    return DigestFacade("choreo", fails=refuse_two)


def steps(batch: int) -> CompiledGraph:
    from vllm_choreo.planner import Msg, build, ops

    q = ops.placeholder("q")
    system = Msg("system", "You answer questions. " * 20)
    state = ops.llm([system, Msg("user", q)])
    for _ in range(3):
        state = ops.llm([system, Msg("user", ops.fmt("Improve: {} {}", q, state))])
    return build([state]).compile(q=[f"question {i}" for i in range(batch)])


def is_there(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def workers() -> Iterator[RayWorkers]:
    with ray_workers(2, make, num_cpus=0.1, env={"PYTHONPATH": os.pathsep.join(_paths())}) as found:
        pids = [worker.pid for worker in found]
        yield found
        pids += [worker.pid for worker in found]
    while any(map(is_there, pids)):  # none is left behind
        time.sleep(0.1)


def _paths() -> list[str]:
    import sys

    return [path for path in sys.path if path]


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_answers_are_those_of_the_naive_run(workers: RayWorkers, semantics: str) -> None:
    for seed in range(3):
        compiled = RandomGraph(seed, num_ops=15).compile(4)
        result = invoke(compiled, workers, semantics=semantics)
        assert list(result) == naive(compiled, DigestFacade("baseline"))
    result = invoke(steps(12), workers, semantics=semantics)
    assert {lane.worker for lane in result.stats.lanes} == {0, 1}


@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_a_worker_that_is_killed_loses_nothing(workers: RayWorkers, semantics: str) -> None:
    compiled = steps(24)
    seen: list[int] = []

    def kill(query: int, value: Any) -> None:
        seen.append(query)
        if len(seen) == 5:
            os.kill(workers[0].pid, signal.SIGKILL)

    result = invoke(compiled, workers, semantics=semantics, on_result=kill)
    assert list(result) == naive(compiled, DigestFacade("baseline"))
    assert sorted(seen) == list(range(24)), "each query is told once"
    assert result.stats.num_retries > 0
    calls = [lane.task for lane in result.stats.lanes]
    assert len(calls) == len(set(calls)) == 96


def test_what_a_worker_refuses_arrives_as_it_was_raised(workers: RayWorkers) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(_paths())}
    with ray_workers(1, make_refusing, num_cpus=0.1, env=paths) as refusing:
        from tests.planner.test_runs import two_steps

        result = invoke(two_steps(), refusing)
    assert set(result.errors) == {1}
    assert isinstance(result.errors[1].__cause__.__cause__, TooLongError)

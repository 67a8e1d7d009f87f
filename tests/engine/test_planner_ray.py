# SPDX-License-Identifier: Apache-2.0
"""Two workers of Ray's, each with an engine, of which one is killed: the answers stay the same."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.byte_model import make_byte_model
from vllm_choreo.planner import build, invoke
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.patterns import debate
from vllm_choreo.planner.physical.profile import Profile

pytest.importorskip("ray")

from vllm_choreo.planner.workers.ray import RayWorkers

pytestmark = pytest.mark.exhaustive  # processes of their own

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine ends with the actor
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def make(path: str, mode: str) -> Any:
    from tests.engine.engines import start_engine
    from vllm_choreo import Choreography

    return Choreography(start_engine(Path(path), max_num_batched_tokens=1024), mode=mode)


def processes() -> set[int]:
    """Of this machine's processes, those of Ray's and their children."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"ray::" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def _check_moves(compiled: CompiledGraph, workers: RayWorkers) -> None:
    """Answers go through Ray's object store, and two workers say what one says."""
    profile = Profile()
    for operator in compiled.graph.nodes:
        if operator.kind == "llm":  # as if answers were long: to read them pays
            profile.add(operator.name, 100.0)
    for worker in workers:
        worker.min_moved_tokens = 1
    options: dict[str, Any] = {"semantics": "choreo", "profile": profile}
    one, two = (invoke(compiled, found, **options) for found in ([workers[0]], workers))
    assert list(one) == list(two) and not one.errors
    assert two.stats.num_moved > 0 == one.stats.num_moved


@pytest.mark.slow
def test_an_engine_that_is_killed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_choreo.planner.workers.ray import ray_workers

    # Ray gives way to all other programs, and beside other tests an engine starts in minutes.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    path = str(make_byte_model(tmp_path))
    compiled = build(
        debate(["You are terse.", "You doubt it."], sampling={"max_tokens": 6, "temperature": 0.0})
    ).compile(context=[f"There are {i} cows." for i in range(12)], question="How many?")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ENVIRONMENT}
    before = processes()
    seen: list[int] = []
    with ray_workers(2, partial(make, path, "choreo"), width=4, num_cpus=0.5, env=paths) as workers:
        expected = list(invoke(compiled, workers))
        _check_moves(compiled, workers)

        def kill(query: int, value: Any) -> None:
            seen.append(query)
            if len(seen) == 3:
                os.kill(workers[0].pid, signal.SIGKILL)

        result = invoke(compiled, workers, on_result=kill)
    assert list(result) == expected
    assert sorted(seen) == list(range(12)) and result.stats.num_retries > 0
    tasks = [lane.task for lane in result.stats.lanes]
    assert len(tasks) == len(set(tasks))
    while processes() - before:  # none is left behind
        time.sleep(0.2)

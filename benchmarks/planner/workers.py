# SPDX-License-Identifier: Apache-2.0
"""Makespan of a plan on one worker and on two, each a Ray actor with an engine.

    python -m benchmarks.planner.workers [--workflow trading ...] [--queries 4] [--turns 2]

The workers share the machine: with one, its engine has all cores; with two, each has half of them.
Engines are started anew for every turn, untimed. Exact plans say the same, or the run fails;
choreographed ones need not: what is short is read where it lies, and encoded again, by itself, on
the other worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.planner.rivals.text import WIDTH
from benchmarks.planner.rivals.ways import Ran, planned_on
from benchmarks.planner.rivals.workloads import Workload, add_sizes, asked_workload
from benchmarks.planner.tables import COUNTS, NAME, TABLES

SEMANTICS = ("exact", "choreo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.workflow or ["trading"]:
        name, one = asked_workload(name, args)
        for semantics in SEMANTICS:
            rows += _turns(name, one, semantics, args.turns)
            write_csv(NAME, rows, **record())
    print(as_text(TABLES.values()))
    return 0


def _turns(name: str, one: Workload, semantics: str, num_turns: int) -> list[dict[str, Any]]:
    """A row for each turn and number of workers."""
    rows, expected = [], None
    for turn in range(num_turns):
        for count in in_turn(COUNTS, turn):
            ran = _run(one, count, semantics)
            expected = expected or ran.results
            if semantics == "exact" and ran.results != expected:
                raise SystemExit(f"{name}: {count} workers say something else")
            what = {"workflow": name, "semantics": semantics, "workers": count, "turn": turn}
            numbers = {"seconds": round(ran.seconds, 3), "calls": ran.num_calls}
            rows.append({**what, **numbers, "prompt": ran.prompt, "encoded": ran.encoded})
            print(rows[-1], flush=True)
    return rows


def _run(one: Workload, count: int, semantics: str) -> Ran:
    from vllm_choreo.planner.workers.ray import ray_workers

    threads = max(1, (os.cpu_count() or 1) // count)
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine ends with its actor
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    os.environ.update({"RAY_worker_niceness": "0"})  # as the engines of other benchmarks
    with ray_workers(count, _facade, width=WIDTH, num_cpus=threads, env=env) as workers:
        return asyncio.run(_planned(workers, one, semantics))


async def _planned(workers: Any, one: Workload, semantics: str) -> Ran:
    first = {"temperature": 0.0, "max_tokens": 2}
    for worker in workers:  # first calls of a process are slow
        answer = await worker.decode("Hello", (), False, first)
        await worker.free(answer.messages())
    return await planned_on(workers, one, semantics=semantics)


def _facade() -> Any:
    """In an actor's process."""
    from vllm import LLM

    from vllm_choreo import Choreography
    from vllm_choreo.testing.models.embedded import embedded_model

    llm = LLM(
        str(embedded_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=WIDTH,
        block_size=BLOCK_SIZE,
    )
    return Choreography(llm)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Engines behind Ray Serve: two choices, prefix affinity and ours on the same sessions.

What each answers is compared with what one engine answers: first on some sessions, before anything
is measured, and then on those that are.

A tiny model has next to nothing to encode, and shows what placing and messages cost; the embedded
one shows what is saved.

python -m benchmarks.serve [--model embedded] [--engines 3] [--sessions 60] [--policies choreo]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.stats import percentile
from benchmarks.harness.tables import as_text
from benchmarks.serve.policies import Policy, Served, started
from benchmarks.serve.reference import Answers, reference
from benchmarks.serve.tables import MODELS, POLICIES, TABLES
from benchmarks.serve.workload import Session, sessions
from vllm_choreo.cluster.ray_processes import start_ray
from vllm_choreo.testing.models.embedded import embedded_model
from vllm_choreo.testing.models.tiny import make_tiny_model

_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 512,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "seed": 0,
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine is one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
_STORE_BYTES = 200_000_000  # of Ray's objects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    args = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    first, work = sessions(args.engines, seed=1), sessions(args.sessions)
    with tempfile.TemporaryDirectory() as folder:
        is_tiny = args.model == "tiny"
        model = str(make_tiny_model("llama", Path(folder)) if is_tiny else embedded_model())
        text, messages = reference(model, _OPTIONS, [*first, *work])
        for name in args.policies:
            expected = messages if name == "choreo" else text
            served = asyncio.run(_run(name, model, args, first, work, expected[: len(first)]))
            row = _row(name, args, served, expected[len(first) :])
            print(row, flush=True)
            _add({**row, **record()})
    print(as_text(TABLES.values()))
    rows = [row for row in read_csv("serve") if row["policy"] in args.policies]
    return int(any(int(row["wrong_answers"]) for row in rows if row["model"] == args.model))


@dataclass(frozen=True)
class _Run:
    """Sessions that were served.

    Attributes:
        turns: turns of each session.
        num_encoded: prompt tokens that engines have encoded for them.
        seconds: time that all of them took.
    """

    turns: list[list[Served]]
    num_encoded: int
    seconds: float


async def _run(
    name: str,
    model: str,
    args: argparse.Namespace,
    first: Sequence[Session],
    work: Sequence[Session],
    expected: Answers,
) -> _Run:
    """Serve all sessions with a policy, if it answers the first ones as expected."""
    # Ray's tree of prefixes asks for one CPU.
    start_ray(2, log_to_driver=False, object_store_memory=_STORE_BYTES)
    try:
        async with started(name, model, args.engines, _OPTIONS) as policy:
            wrong = _num_wrong(await _serve_all(policy, first, args.at_once), expected)
            if wrong:
                raise AssertionError(f"{name}: {wrong} answers are not those of one engine")
            before, began = policy.num_encoded, time.perf_counter()
            turns = await _serve_all(policy, work, args.at_once)
            seconds = time.perf_counter() - began
            return _Run(turns, policy.num_encoded - before, seconds)
    finally:
        await asyncio.to_thread(serve.shutdown)
        ray.shutdown()


async def _serve_all(policy: Policy, work: Sequence[Session], at_once: int) -> list[list[Served]]:
    free = asyncio.Semaphore(at_once)

    async def one(session: Session) -> list[Served]:
        async with free:
            return await policy.serve(session)

    return await asyncio.gather(*map(one, work))


def _num_wrong(found: Sequence[Sequence[Served]], expected: Answers) -> int:
    """Number of answers that are others than expected."""
    return sum(
        turn.generated != answer
        for turns, answers in zip(found, expected, strict=True)
        for turn, answer in zip(turns, answers, strict=True)
    )


def _row(name: str, args: argparse.Namespace, run: _Run, expected: Answers) -> dict[str, Any]:
    served = [turn for turns in run.turns for turn in turns]
    ttft = [turn.ttft * 1000 for turn in served]
    return {
        "policy": name,
        "model": args.model,
        "engines": args.engines,
        "sessions": args.sessions,
        "at_once": args.at_once,
        "calls": len(served),
        "prompt_tokens": sum(turn.num_prompt for turn in served),
        "encoded_tokens": run.num_encoded,
        "ttft_p50_ms": round(percentile(ttft, 0.5), 1),
        "ttft_p95_ms": round(percentile(ttft, 0.95), 1),
        "seconds": round(run.seconds, 1),
        "wrong_answers": _num_wrong(run.turns, expected),
        "load": round(os.getloadavg()[1], 1),  # of the last five minutes
    }


def _add(row: Mapping[str, Any]) -> None:
    """Write a policy's row in place of the one that is there."""

    def place(row: Mapping[str, Any]) -> tuple[int, int]:
        return MODELS.index(row["model"]), POLICIES.index(row["policy"])

    rest = [other for other in read_csv("serve") if place(other) != place(row)]
    write_csv("serve", sorted([*rest, row], key=place))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Engines behind Ray Serve: two choices, prefix affinity and ours on the same sessions.

python -m benchmarks.serve [--engines 3] [--sessions 60] [--at-once 6] [--policies choreo]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.stats import percentile
from benchmarks.harness.tables import as_text
from benchmarks.serve.tables import POLICIES, TABLES
from benchmarks.serve.workload import Session, sessions

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    args = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    rows = [asyncio.run(_run(name, args)) for name in args.policies]
    kept = [row for row in read_csv("serve") if row["policy"] not in args.policies]
    write_csv("serve", [*kept, *rows])
    print(as_text(TABLES.values()))
    return 0


async def _run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Serve all sessions with a policy; its row."""
    import ray
    from ray import serve

    from benchmarks.serve.policies import started
    from vllm_choreo.cluster.ray_processes import start_ray
    from vllm_choreo.testing.models.tiny import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model("llama", Path(folder)))
        start_ray(2, log_to_driver=False)  # Ray's tree of prefixes asks for one
        try:
            async with started(name, model, args.engines, _OPTIONS) as policy:
                await _serve_all(policy, sessions(args.engines, seed=1), args.at_once)  # warm
                before, began = policy.num_encoded, time.perf_counter()
                served = await _serve_all(policy, sessions(args.sessions), args.at_once)
                seconds = time.perf_counter() - began
                num_encoded = policy.num_encoded - before
        finally:
            await asyncio.to_thread(serve.shutdown)
            ray.shutdown()
    ttft = [turn.ttft * 1000 for turn in served]
    row = {
        "policy": name,
        "engines": args.engines,
        "sessions": args.sessions,
        "at_once": args.at_once,
        "prompt_tokens": sum(turn.num_prompt for turn in served),
        "encoded_tokens": num_encoded,
        "ttft_p50_ms": round(percentile(ttft, 0.5), 1),
        "ttft_p95_ms": round(percentile(ttft, 0.95), 1),
        "seconds": round(seconds, 1),
    }
    print(row, flush=True)
    return {**row, **record()}


async def _serve_all(policy: Any, work: Sequence[Session], at_once: int) -> list[Any]:
    free = asyncio.Semaphore(at_once)

    async def one(session: Session) -> list[Any]:
        async with free:
            found: list[Any] = await policy.serve(session)
            return found

    return [turn for turns in await asyncio.gather(*map(one, work)) for turn in turns]


if __name__ == "__main__":
    sys.exit(main())

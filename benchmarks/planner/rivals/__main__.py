# SPDX-License-Identifier: Apache-2.0
"""Makespan of the paper's workflows: plans against other ways to run the same calls.

    python -m benchmarks.planner.rivals --workflow trading --queries 4 --turns 3

All ways run on one engine, in turn, with an empty cache before each; answers have a fixed length,
and those of exact ways are compared token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.turns import in_turn
from benchmarks.planner.rivals.page import BARS, reached, section
from benchmarks.planner.rivals.ways import ABLATIONS, WAYS
from benchmarks.planner.rivals.workloads import NAMES, workloads


def main() -> int:
    args = _arguments()
    set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # calls overlap in an engine of its own
    rows = asyncio.run(compare(args))
    print(section())
    return int(any(found < BARS[bar] for bar, found in reached(rows).items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workflow", choices=NAMES, action="append")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=150, help="of a context or document")
    parser.add_argument("--ablations", action="store_true", help="plans that lack something, too")
    return parser.parse_args()


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each workflow, way and turn, written as they come."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.smallmodel.embedded import embedded_model

    arguments = AsyncEngineArgs(
        str(embedded_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    llm = AsyncLLM.from_engine_args(arguments)
    rows: list[dict[str, Any]] = []
    try:
        for name in args.workflow or NAMES:
            compiled = workloads(args.queries, args.answer_tokens, args.words)[name]
            rows += await _workflow(llm, name, compiled, args)
            write_csv("planner_rivals", rows, **record())
    finally:
        llm.shutdown()
    return rows


async def _workflow(
    llm: Any, name: str, compiled: Any, args: argparse.Namespace
) -> list[dict[str, Any]]:
    ways = [way for way in WAYS if args.ablations or way not in ABLATIONS]
    rows, expected = [], None
    for turn in range(args.turns):
        for way in in_turn(ways, turn):
            await llm.reset_prefix_cache()
            ran = await WAYS[way](llm, compiled)
            if "choreographed" not in way and way not in ABLATIONS:
                expected = expected or ran.results
                if ran.results != expected:
                    raise SystemExit(f"{name}: {way} says something else than the others")
            numbers = {"seconds": round(ran.seconds, 3), "calls": ran.num_calls}
            row = {"workflow": name, "way": way, "turn": turn, **numbers, "encoded": ran.encoded}
            print(row, flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

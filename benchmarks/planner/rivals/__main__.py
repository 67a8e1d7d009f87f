# SPDX-License-Identifier: Apache-2.0
"""Makespan of the paper's workflows: plans against other ways to run the same calls.

    python -m benchmarks.planner.rivals --workflow trading --queries 4 --turns 3
        [--ablations | --way LangGraph --way 'plan, choreographed' ...]
    python -m benchmarks.planner.rivals --sweep

All ways run on one engine, in turn, with an empty cache before each; answers have a fixed length,
and those of exact ways are compared token by token. Before trading, the day before is run, untimed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.turns import in_turn
from benchmarks.planner.rivals.page import BARS, NAME, SWEEP, reached, section
from benchmarks.planner.rivals.text import WIDTH
from benchmarks.planner.rivals.ways import ABLATIONS, SWEPT, WAYS
from benchmarks.planner.rivals.workloads import NAMES, Workload, add_sizes, trading_days, workload


def main() -> int:
    args = _arguments()
    set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # calls overlap in an engine of its own
    rows = asyncio.run(compare(args))
    print(section())
    if args.sweep:
        return 0
    return int(any(found < BARS[bar] for bar, found in reached(rows).items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ablations", action="store_true", help="plans that lack something, too")
    what.add_argument("--way", choices=WAYS, action="append", help="these alone")
    what.add_argument("--sweep", action="store_true", help="trading in several sizes, few ways")
    args = parser.parse_args()
    if args.sweep and args.workflow:
        parser.error("the sweep is of trading: leave out --workflow")
    return args


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each workflow, way and turn, written as they come.

    Rows of other workflows, from an earlier run, are kept.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.smallmodel.embedded import embedded_model

    arguments = AsyncEngineArgs(
        str(embedded_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=WIDTH,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    llm = AsyncLLM.from_engine_args(arguments)
    asked, file = asked_for(args), SWEEP if args.sweep else NAME
    kept = [row for row in read_csv(file) if row["workflow"] not in asked]
    rows: list[dict[str, Any]] = []
    try:
        await WAYS["operator by operator"](llm, workload("map_reduce", 1, 4, 20))  # first calls
        for name, one in asked.items():
            ran = await _workload(llm, name, one, _ways(args), args.turns)
            rows += [{**row, **record()} for row in ran]
            write_csv(file, [*kept, *rows])
    finally:
        llm.shutdown()
    return rows


def asked_for(args: argparse.Namespace) -> dict[str, Workload]:
    """By name; of a sweep, those that differ from trading in one thing."""
    sizes = (args.queries, args.answer_tokens, args.words)
    if not args.sweep:
        return {name: workload(name, *sizes) for name in args.workflow or NAMES}
    found = {"as it is": trading_days(*sizes)}
    for queries in (max(args.queries // 2, 1), 2 * args.queries):
        found[f"{queries} queries"] = trading_days(queries, *sizes[1:])
    found |= {f"{count} traders": trading_days(*sizes, traders=count) for count in (1, 4)}
    return found | {f"{count} rounds": trading_days(*sizes, rounds=count) for count in (2, 3)}


def _ways(args: argparse.Namespace) -> Sequence[str]:
    if args.sweep or args.way:
        return args.way or SWEPT
    return [way for way in WAYS if args.ablations or way not in ABLATIONS]


async def _workload(
    llm: Any, name: str, one: Workload, ways: Sequence[str], num_turns: int
) -> list[dict[str, Any]]:
    rows, expected = [], None
    for turn in range(num_turns):
        for way in in_turn(ways, turn):
            await llm.reset_prefix_cache()
            ran = await WAYS[way](llm, one)
            if "choreographed" not in way and way not in ABLATIONS:
                expected = expected or ran.results
                if ran.results != expected:
                    raise SystemExit(f"{name}: {way} says something else than the others")
            numbers = {"seconds": round(ran.seconds, 3), "calls": ran.num_calls}
            numbers |= {"prompt": ran.prompt, "encoded": ran.encoded}
            row = {"workflow": name, "way": way, "turn": turn, **numbers}
            print(row, flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

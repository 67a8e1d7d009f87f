# SPDX-License-Identifier: Apache-2.0
"""Makespan of the paper's workflows: plans against other ways to run the same calls.

    python -m benchmarks.planner.rivals --workflow trading --queries 4 --turns 3
        [--ablations | --way LangGraph --way 'plan, choreographed' ...]
    python -m benchmarks.planner.rivals --sweep
    python -m benchmarks.planner.rivals --pool 4096 --workflow debate --queries 8 --way ...

All ways run in turn, with an empty cache before each, on one engine, and LangGraph on a server
without the plugin, which sleeps meanwhile. Answers have a fixed length, and those of exact ways are
compared token by token. Before trading, the day before is run, untimed. With `--one-process`
engines run the model themselves, instead of in a third process for which they wait by looking,
which takes much of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.planner.rivals.bars import BARS, Batch, batches, reached
from benchmarks.planner.rivals.served import stock_server
from benchmarks.planner.rivals.tables import NAME, POOLS, SWEEP, TABLES
from benchmarks.planner.rivals.text import WIDTH
from benchmarks.planner.rivals.ways import ABLATIONS, SERVED, SWEPT, WAYS, Engines
from benchmarks.planner.rivals.workloads import (
    NAMES,
    Workload,
    add_sizes,
    asked_workload,
    trading_days,
    workload,
)

_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": WIDTH,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": True,
}
_ONE_PROCESS = {
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}


def main() -> int:
    args = _arguments()
    set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # calls overlap in an engine of its own
    rows = asyncio.run(compare(args))
    print(as_text(TABLES.values()))
    if args.sweep:
        return 0
    if args.pool is not None:
        return 0
    return int(any(found < BARS[bar] for bar, (found, _) in reached(rows).items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.add_argument("--turns", type=int, default=2)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ablations", action="store_true", help="plans that lack something, too")
    what.add_argument("--way", choices=WAYS, action="append", help="these alone")
    what.add_argument("--sweep", action="store_true", help="trading in several sizes, few ways")
    says = "engines run the model themselves, without a process for it"
    parser.add_argument("--one-process", action="store_true", help=says)
    parser.add_argument("--pool", type=int, help="tokens of KV cache; by default enough for all")
    args = parser.parse_args()
    if args.sweep and args.workflow:
        parser.error("the sweep is of trading: leave out --workflow")
    return args


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch, way and turn, written as they come.

    Rows of other batches, from an earlier run, are kept; of a sweep, none.
    """
    asked, ways = asked_for(args), _ways(args)
    file = SWEEP if args.sweep else NAME if args.pool is None else POOLS
    again = {Batch(name, args.queries, args.one_process) for name in asked}
    others = [rows for batch, rows in batches(read_csv(file)).items() if batch not in again]
    kept = [] if args.sweep or args.pool else [row for rows in others for row in rows]
    rows: list[dict[str, Any]] = []
    async with _engines(ways, args.one_process, args.pool) as engines:
        first_calls = workload("map_reduce", 1, 4, 20)
        await WAYS["operator by operator"](engines, first_calls)
        if engines.server is not None:
            await WAYS[SERVED](engines, first_calls)
        for name, one in asked.items():
            ran = await _workload(engines, name, one, ways, args.turns)
            where = {"one_process": str(args.one_process), "pool": args.pool or ""}
            rows += [{**row, **where, **record()} for row in ran]
            write_csv(file, [*kept, *rows])
    return rows


@asynccontextmanager
async def _engines(
    ways: Sequence[str], one_process: bool = False, pool: int | None = None
) -> AsyncIterator[Engines]:
    """What these ways are run on."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.testing.models.embedded import embedded_model

    model, options = embedded_model(), engine_options(one_process, pool)
    with ExitStack() as stack:
        server = stack.enter_context(stock_server(model, **options)) if SERVED in ways else None
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **options))
        stack.callback(llm.shutdown)
        yield Engines(llm, server, pool)


def engine_options(one_process: bool, pool: int | None) -> dict[str, Any]:
    """Options of `vllm.AsyncEngineArgs`; `pool` is the tokens of its KV cache, None: enough."""
    options = {**_ENGINE, **(_ONE_PROCESS if one_process else {})}
    if pool is not None:
        options["num_gpu_blocks_override"] = pool // BLOCK_SIZE
        room = pool - BLOCK_SIZE  # vLLM keeps a block for itself
        options["max_model_len"] = min(options["max_model_len"], room)
    return options


def asked_for(args: argparse.Namespace) -> dict[str, Workload]:
    """By name; of a sweep, those that differ from trading in one thing."""
    sizes = (args.queries, args.answer_tokens, args.words)
    if not args.sweep:
        return dict(asked_workload(name, args) for name in args.workflow or NAMES)
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
    engines: Engines, name: str, one: Workload, ways: Sequence[str], num_turns: int
) -> list[dict[str, Any]]:
    rows, expected = [], None
    for turn in range(num_turns):
        for way in in_turn(ways, turn):
            ran = await WAYS[way](engines, one)
            if "choreographed" not in way and way not in ABLATIONS:
                expected = expected or ran.results
                if ran.results != expected:
                    raise SystemExit(f"{name}: {way} says something else than the others")
            row = {"workflow": name, "queries": len(ran.results), "way": way, "turn": turn}
            row |= {"seconds": round(ran.seconds, 3), "calls": ran.num_calls}
            row |= {"prompt": ran.prompt, "encoded": ran.encoded}
            print(row, flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

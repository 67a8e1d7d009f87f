# SPDX-License-Identifier: Apache-2.0
"""Makespan of the paper's workflows: plans against other ways to run the same calls.

    python -m benchmarks.planner.rivals --workflow trading --queries 4

All ways run on one engine, in turn, with an empty cache before each; answers have a fixed length,
and those of exact ways are compared token by token. `as they come` is a dataflow run: each call as
soon as its inputs are there, over vLLM's prefix caching, as orchestration frameworks do it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.planner.data import role, text
from vllm_choreo.planner import CompiledGraph, FacadeWorker, Planner, build
from vllm_choreo.planner.patterns import (
    debate,
    iterative_refinement,
    map_reduce,
    parallel_chains,
    reflection,
    trading,
)
from vllm_choreo.planner.run_stats import RunStats

PLAIN = {"prune": False, "merge": False, "schedule": False, "reuse": False, "warm": False}
_ROLES = [role(name, 60) for name in ("an economist", "a lawyer", "an engineer", "a historian")]


def workloads(num_queries: int, num_out: int, words: int) -> dict[str, CompiledGraph]:
    """The six workflows; `words` are those of a context or a document."""
    sampling = {"temperature": 0.0, "max_tokens": num_out, "ignore_eos": True}
    each = range(num_queries)
    task = {
        "context": [text(f"context {i}", words) for i in each],
        "question": [text(f"question {i}", 12) for i in each],
    }
    chunks = {f"chunk_{c}": [text(f"{i} {c}", words) for i in each] for c in (1, 2, 3)}
    desk = {
        kind: [text(f"{kind} {i}", words) for i in each]
        for kind in ("market", "social", "news", "fundamentals")
    }
    tickers = [f"T{i}" for i in each]
    return {
        "map_reduce": build([map_reduce(_ROLES, sampling=sampling)]).compile(**task),
        "debate": build(debate(_ROLES[:3], sampling=sampling)).compile(**task),
        "reflection": build([reflection(_ROLES[:2], sampling=sampling)]).compile(**task),
        "iterative": build([iterative_refinement(3, sampling=sampling)]).compile(**chunks),
        "parallel": build([parallel_chains(_ROLES, 3, sampling=sampling)]).compile(**chunks),
        "trading": build([trading(_ROLES[:3], rounds=1, sampling=sampling)]).compile(
            ticker=tickers, **desk
        ),
    }


@dataclass
class Ran:
    """A way that was run: its results, seconds, and tokens."""

    results: list[Any]
    seconds: float
    num_calls: int
    encoded: int


async def by_query(llm: Any, compiled: CompiledGraph) -> Ran:
    """One query after the other, and its calls one after the other."""
    return await _planned(llm, compiled, "baseline", width=1, one_by_one=True, **PLAIN)


async def as_they_come(llm: Any, compiled: CompiledGraph) -> Ran:
    return await _planned(llm, compiled, "baseline", **PLAIN)


async def exact_text(llm: Any, compiled: CompiledGraph) -> Ran:
    return await _planned(llm, compiled, "baseline")


async def exact_messages(llm: Any, compiled: CompiledGraph) -> Ran:
    return await _planned(llm, compiled, "choreo")


async def choreographed(llm: Any, compiled: CompiledGraph) -> Ran:
    return await _planned(llm, compiled, "choreo", semantics="choreo")


async def by_operator(llm: Any, compiled: CompiledGraph) -> Ran:
    """Each operator for all queries before the next one."""
    from vllm_choreo import AsyncChoreography
    from vllm_choreo.planner.values import CHATML, evaluate, prompt_text

    begun, calls = time.perf_counter(), []
    values: dict[tuple[int, int], Any] = {}
    async with AsyncChoreography(llm, mode="baseline") as c:
        worker = FacadeWorker(c, width=16)
        for number, node in enumerate(compiled.graph.nodes):
            asked = []
            for query in range(compiled.batch_size):
                inputs = [values[given, query] for given in node.inputs]
                if number in compiled.inputs:
                    values[number, query] = compiled.inputs[number][query]
                elif node.kind != "llm":
                    values[number, query] = evaluate(node, inputs)
                else:
                    prompt = prompt_text(node, inputs, CHATML)
                    asked.append(worker.decode(prompt, (), True, node.attrs["sampling"]))
            for query, answer in enumerate(await asyncio.gather(*asked)):
                values[number, query] = answer.text
                calls.append(answer)
    results = [
        _result({name: values[node, query] for name, node in compiled.graph.outputs.items()})
        for query in range(compiled.batch_size)
    ]
    encoded = sum(answer.num_prompt - answer.reused for answer in calls)
    return Ran(results, time.perf_counter() - begun, len(calls), encoded)


WAYS: dict[str, Callable[[Any, CompiledGraph], Awaitable[Ran]]] = {
    "query by query": by_query,
    "operator by operator": by_operator,
    "as they come": as_they_come,
    "plan, exact, text": exact_text,
    "plan, exact, messages": exact_messages,
    "plan, choreographed": choreographed,
}


async def _planned(
    llm: Any,
    compiled: CompiledGraph,
    mode: str,
    width: int = 16,
    one_by_one: bool = False,
    **options: Any,
) -> Ran:
    from vllm_choreo import AsyncChoreography

    parts = [compiled.query(i) for i in range(compiled.batch_size)] if one_by_one else [compiled]
    begun, results, stats = time.perf_counter(), [], RunStats()
    async with AsyncChoreography(llm, mode=mode) as c:
        planner = Planner(FacadeWorker(c, width=width), **options)
        for node in compiled.graph.nodes:  # as a profile would have it: lengths are fixed here
            if node.kind == "llm":
                planner.profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
        for part in parts:
            result = await planner.ainvoke(part)
            results += list(result)
            stats.num_calls += result.stats.num_calls
            stats.num_encoded += result.stats.num_encoded
        seconds = time.perf_counter() - begun
    return Ran(results, seconds, stats.num_calls, stats.num_encoded)


def _result(values: dict[str, Any]) -> Any:
    return values if len(values) > 1 else next(iter(values.values()))


async def compare(names: list[str], num_queries: int, num_out: int, words: int) -> None:
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
    try:
        for name in names:
            compiled = workloads(num_queries, num_out, words)[name]
            expected = None
            for way, run in WAYS.items():
                await llm.reset_prefix_cache()
                ran = await run(llm, compiled)
                expected = expected or ran.results
                same = "-" if "choreo" in way else str(ran.results == expected)
                print(
                    f"{name:12} {way:22} {ran.seconds:8.1f} s  {ran.num_calls:4} calls  "
                    f"{ran.encoded:7} tokens encoded  same answers: {same}",
                    flush=True,
                )
    finally:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(workloads(1, 1, 1))
    parser.add_argument("--workflow", choices=names, action="append")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=150, help="of a context or document")
    given = parser.parse_args()
    set_environment()
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # calls overlap in an engine of its own
    asyncio.run(compare(given.workflow or names, given.queries, given.answer_tokens, given.words))


if __name__ == "__main__":
    main()

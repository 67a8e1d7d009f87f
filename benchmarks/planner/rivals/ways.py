# SPDX-License-Identifier: Apache-2.0
"""The ways to run a batch, all on one engine: rivals, plans, and plans that lack something.

| rival | what runs next |
|---|---|
| query by query | one call after the other |
| operator by operator | an operator for all queries, before the next operator |
| as they come | every call as soon as its inputs are there |
| longest shared prefix | of these, the one whose prompt shares most with one sent (as SGLang) |
| LangGraph | the package's own runner, `abatch` over the queries |

Rivals send text over vLLM's prefix caching, as many calls at a time as plans do.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.planner.rivals.state_graph import langgraph
from benchmarks.planner.rivals.text import WIDTH, Text
from vllm_choreo.planner import CompiledGraph, FacadeWorker, Planner
from vllm_choreo.planner.nodes import Node
from vllm_choreo.planner.run_stats import RunStats


@dataclass
class Ran:
    """A way that was run: its results, seconds, and tokens."""

    results: list[Any]
    seconds: float
    num_calls: int
    encoded: int


Way = Callable[[Any, CompiledGraph], Awaitable[Ran]]


# -- rivals --------------------------------------------------------------------------------------


Runner = Callable[[Text], Awaitable[list[dict[int, Any]]]]


async def as_text(llm: Any, compiled: CompiledGraph, runner: Runner) -> Ran:
    """A rival: `runner` makes the values of all operators, query by query."""
    from vllm_choreo import AsyncChoreography

    begun = time.perf_counter()
    async with AsyncChoreography(llm, mode="baseline") as c:
        text = Text(FacadeWorker(c, width=WIDTH), compiled)
        values = await runner(text)
    seconds = time.perf_counter() - begun
    outputs = compiled.graph.outputs
    results = [_result({name: of[node] for name, node in outputs.items()}) for of in values]
    encoded = sum(answer.num_prompt - answer.reused for answer in text.answers)
    return Ran(results, seconds, len(text.answers), encoded)


async def query_by_query(text: Text) -> list[dict[int, Any]]:
    found = text.given()
    for values in found:
        for number, node in enumerate(text.compiled.graph.nodes):
            if number not in values:
                inputs = [values[given] for given in node.inputs]
                values[number] = await text.value(number, inputs)
    return found


async def operator_by_operator(text: Text) -> list[dict[int, Any]]:
    found = text.given()
    places = asyncio.Semaphore(WIDTH)

    async def one(number: int, node: Node, values: dict[int, Any]) -> None:
        async with places:
            values[number] = await text.value(number, [values[given] for given in node.inputs])

    for number, node in enumerate(text.compiled.graph.nodes):
        missing = [values for values in found if number not in values]
        await asyncio.gather(*(one(number, node, values) for values in missing))
    return found


async def dataflow(text: Text, by_prefix: bool) -> list[dict[int, Any]]:
    """Calls whose inputs are there, in the order in which they were; or by the prefix they share.

    Args:
        by_prefix: the next one is that which shares most with a prompt that was sent.
    """
    found, nodes = text.given(), text.compiled.graph.nodes
    sent: list[str] = []
    running: dict[asyncio.Task[Any], tuple[int, int]] = {}
    begun: set[tuple[int, int]] = set()

    def is_ready(query: int, number: int) -> bool:
        values = found[query]
        is_new = number not in values and (query, number) not in begun
        return is_new and all(given in values for given in nodes[number].inputs)

    def shared(place: tuple[int, int]) -> int:
        query, number = place
        if nodes[number].kind != "llm":
            return 1 << 30  # costs nothing
        prompt = text.prompt(number, [found[query][given] for given in nodes[number].inputs])
        beside = bisect_left(sent, prompt)  # who shares most with it stands next to it
        nearest = sent[max(0, beside - 1) : beside + 1]
        return max((num_shared(prompt, other) for other in nearest), default=0)

    while True:
        ready = [(q, n) for q in range(len(found)) for n in range(len(nodes)) if is_ready(q, n)]
        while ready and len(running) < WIDTH:
            query, number = place = max(ready, key=shared) if by_prefix else ready[0]
            ready.remove(place)
            begun.add(place)
            inputs = [found[query][given] for given in nodes[number].inputs]
            if nodes[number].kind == "llm":
                insort(sent, text.prompt(number, inputs))
            running[asyncio.ensure_future(text.value(number, inputs))] = place
        if not running:
            return found
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            query, number = running.pop(task)
            found[query][number] = task.result()


def num_shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        same = one[low:middle] == other[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


# -- plans ---------------------------------------------------------------------------------------


async def planned(llm: Any, compiled: CompiledGraph, mode: str, **options: Any) -> Ran:
    """The planner, with messages or as text."""
    from vllm_choreo import AsyncChoreography

    begun, stats = time.perf_counter(), RunStats()
    async with AsyncChoreography(llm, mode=mode) as c:
        planner = Planner(FacadeWorker(c, width=WIDTH), **options)
        for node in compiled.graph.nodes:  # as a profile would have it: lengths are fixed here
            if node.kind == "llm":
                planner.profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
        result = await planner.ainvoke(compiled)
        stats.num_calls += result.stats.num_calls
        stats.num_encoded += result.stats.num_encoded
        seconds = time.perf_counter() - begun
    return Ran(list(result), seconds, stats.num_calls, stats.num_encoded)


def _result(values: dict[str, Any]) -> Any:
    return values if len(values) > 1 else next(iter(values.values()))


_CHOREO = partial(planned, mode="choreo", semantics="choreo")

RIVALS: dict[str, Way] = {
    "query by query": partial(as_text, runner=query_by_query),
    "operator by operator": partial(as_text, runner=operator_by_operator),
    "as they come": partial(as_text, runner=partial(dataflow, by_prefix=False)),
    "longest shared prefix": partial(as_text, runner=partial(dataflow, by_prefix=True)),
    "LangGraph": partial(as_text, runner=langgraph),
}
PLANS: dict[str, Way] = {
    "plan, exact, text": partial(planned, mode="baseline"),
    "plan, exact, messages": partial(planned, mode="choreo"),
    "plan, choreographed": _CHOREO,
}
# What the choreographed plan takes without one of its parts.
ABLATIONS: dict[str, Way] = {
    "without warming": partial(_CHOREO, warm=False),
    "without merging": partial(_CHOREO, merge=False),
    "without a schedule": partial(_CHOREO, schedule=False),
    "without message reuse": partial(_CHOREO, reuse=False),
}
WAYS = {**RIVALS, **PLANS, **ABLATIONS}

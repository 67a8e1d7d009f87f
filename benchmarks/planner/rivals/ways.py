# SPDX-License-Identifier: Apache-2.0
"""The ways to run a batch: rivals, plans, and plans that lack something.

| rival | what runs next |
|---|---|
| query by query | one call after the other |
| operator by operator | an operator for all queries, before the next operator |
| as they come | every call as soon as its inputs are there |
| longest shared prefix | of these, the one whose prompt shares most with one sent (as SGLang) |
| an agent at a time | as they come, but one call of a role at a time (as AgentScope's actors) |
| gangs by prefix | calls of the earliest stage, those that begin alike together (as Parrot) |
| LangGraph | the package's own runner, `abatch` over the queries; on `vllm serve` |
| LangGraph, in process | the same on the engine of the plans, with no HTTP between |

Rivals send text over vLLM's prefix caching, as many calls at a time as plans do. All but LangGraph
run on one engine, with the plugin.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.planner.rivals.served import completions
from benchmarks.planner.rivals.state_graph import langgraph
from benchmarks.planner.rivals.text import WIDTH, Answers, Text
from benchmarks.planner.rivals.workloads import Workload
from vllm_choreo.planner import AnswerCache, CostModel, EngineModel, FacadeWorker, Planner
from vllm_choreo.planner.logical.nodes import Node
from vllm_choreo.testing.server import Server


@dataclass(frozen=True)
class Engines:
    """What ways are run on, one at a time.

    Attributes:
        llm: an `AsyncLLM` with the plugin.
        server: `vllm serve` without it; None: no way asks for it.
        pool: tokens of their KV cache; None: enough for all.
    """

    llm: Any
    server: Server | None = None
    pool: int | None = None


@dataclass
class Ran:
    """A way that was run.

    Attributes:
        results: of the queries.
        seconds: of the batch alone.
        num_calls: that workers answered.
        prompt: tokens of all prompts.
        encoded: those of them, and of messages for them, that were encoded.
    """

    results: list[Any]
    seconds: float
    num_calls: int
    prompt: int
    encoded: int


Way = Callable[[Engines, Workload], Awaitable[Ran]]


# -- rivals --------------------------------------------------------------------------------------


Runner = Callable[[Text], Awaitable[list[dict[int, Any]]]]
Opened = Callable[[Engines], AbstractAsyncContextManager[Answers]]


@asynccontextmanager
async def in_process(engines: Engines) -> AsyncIterator[Answers]:
    """Text on the engine of the plans, with an empty prefix cache."""
    from vllm_choreo import AsyncChoreography

    await engines.llm.reset_prefix_cache()
    async with AsyncChoreography(engines.llm, mode="baseline") as c:
        yield FacadeWorker(c, width=WIDTH)


@asynccontextmanager
async def served(engines: Engines) -> AsyncIterator[Answers]:
    """Text on a server without the plugin, alike."""
    assert engines.server is not None, "it was started for this way"
    async with completions(engines.server) as worker:
        yield worker


async def as_text(
    engines: Engines, workload: Workload, runner: Runner, opened: Opened = in_process
) -> Ran:
    """A rival: `runner` makes the values of all operators, query by query.

    What was run the day before is in vLLM's prefix cache, as far as there is room.
    """
    async with opened(engines) as worker:
        if workload.before is not None:
            await runner(Text(worker, workload.before))
        begun = time.perf_counter()
        text = Text(worker, workload.batch)
        values = await runner(text)
        seconds = time.perf_counter() - begun
    outputs = workload.batch.graph.outputs
    results = [_result({name: of[node] for name, node in outputs.items()}) for of in values]
    prompt = sum(answer.num_prompt for answer in text.answers)
    encoded = prompt - sum(answer.reused for answer in text.answers)
    return Ran(results, seconds, len(text.answers), prompt, encoded)


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


@dataclass
class Flow:
    """Calls under way, of which some can run.

    Attributes:
        text: the batch.
        found: values that are there, by query and operator.
        running: the calls that are under way, (query, operator).
        sent: prompts that were sent, in their alphabetical order.
    """

    text: Text
    found: list[dict[int, Any]]
    running: dict[asyncio.Task[Any], tuple[int, int]]
    sent: list[str]

    def prompt(self, place: tuple[int, int]) -> str:
        """Prompt of a call that can run."""
        query, number = place
        node = self.text.compiled.graph.nodes[number]
        return self.text.prompt(number, [self.found[query][given] for given in node.inputs])

    def shared(self, place: tuple[int, int]) -> int:
        """Characters with which a call's prompt and one that was sent begin alike."""
        prompt = self.prompt(place)
        beside = bisect_left(self.sent, prompt)  # who shares most with it stands next to it
        nearest = self.sent[max(0, beside - 1) : beside + 1]
        return max((num_shared(prompt, other) for other in nearest), default=0)


Next = Callable[[Flow, list[tuple[int, int]]], tuple[int, int] | None]


def first_come(flow: Flow, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
    return ready[0]


def longest_shared(flow: Flow, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
    return max(ready, key=flow.shared)


def agent_at_a_time(flow: Flow, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Take the first call whose role has none under way: an actor answers one after the other."""
    nodes = flow.text.compiled.graph.nodes
    busy = {role_of(nodes[number]) for _, number in flow.running.values()}
    return next((place for place in ready if role_of(nodes[place[1]]) not in busy), None)


def gangs_by_prefix(flow: Flow, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Take calls of the earliest stage, those that begin alike one after the other."""
    nodes = flow.text.compiled.graph.nodes
    levels: list[int] = []
    for node in nodes:
        levels.append(max((levels[i] for i in node.inputs), default=0) + (node.kind == "llm"))
    return min(ready, key=lambda place: (levels[place[1]], role_of(nodes[place[1]]), place))


def role_of(node: Node) -> str:
    """Role of an `llm` operator: what its system turn says; of others none."""
    return str(node.attrs["turns"][0]) if node.kind == "llm" else ""


async def dataflow(text: Text, choose: Next) -> list[dict[int, Any]]:
    """Run calls whose inputs are there; `choose` says which of them is next, None: none yet."""
    nodes = text.compiled.graph.nodes
    flow = Flow(text, text.given(), {}, [])
    begun: set[tuple[int, int]] = set()

    def is_ready(query: int, number: int) -> bool:
        values = flow.found[query]
        is_new = number not in values and (query, number) not in begun
        return is_new and all(given in values for given in nodes[number].inputs)

    while True:
        each = [(q, n) for q in range(len(flow.found)) for n in range(len(nodes))]
        ready = [place for place in each if is_ready(*place)]
        free = [place for place in ready if nodes[place[1]].kind != "llm"]
        calls = [place for place in ready if nodes[place[1]].kind == "llm"]
        while free or (calls and len(flow.running) < WIDTH):
            place = free.pop() if free else choose(flow, calls)
            if place is None:
                break
            query, number = place
            begun.add(place)
            if place in calls:
                calls.remove(place)
                insort(flow.sent, flow.prompt(place))
            inputs = [flow.found[query][given] for given in nodes[number].inputs]
            flow.running[asyncio.ensure_future(text.value(number, inputs))] = place
        if not flow.running:
            return flow.found
        done, _ = await asyncio.wait(flow.running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            query, number = flow.running.pop(task)
            flow.found[query][number] = task.result()


def num_shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        same = one[low:middle] == other[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


# -- plans ---------------------------------------------------------------------------------------


async def planned(
    engines: Engines, workload: Workload, mode: str, *, caches: bool = True, **options: Any
) -> Ran:
    """The planner, with messages or as text.

    Args:
        caches: answers of the day before are fetched where nothing has changed.
    """
    from vllm_choreo import AsyncChoreography

    await engines.llm.reset_prefix_cache()
    if engines.pool is not None:
        engine = EngineModel(engines.pool, WIDTH, step=4.0, decode=2.5)
        options["cost"] = CostModel(engine=engine)
    async with AsyncChoreography(engines.llm, mode=mode) as c:
        return await planned_on(FacadeWorker(c, width=WIDTH), workload, caches=caches, **options)


async def planned_on(
    workers: Any,
    workload: Workload,
    *,
    caches: bool = True,
    without: Collection[str] = (),
    **options: Any,
) -> Ran:
    """The same on workers that are there: one, or several; `without` parts of `Target.without`."""
    if caches and workload.before is not None:
        options["cache"] = AnswerCache()
    planner = Planner(workers, **options)
    planner.target = replace(planner.target, without=frozenset(without))
    # As a profile would have it: lengths are fixed here.
    for node in workload.batch.graph.nodes:
        if node.kind == "llm":
            planner.profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
    if workload.before is not None:
        await planner.ainvoke(workload.before)
    begun = time.perf_counter()
    result = await planner.ainvoke(workload.batch)
    seconds = time.perf_counter() - begun
    stats = result.stats
    return Ran(list(result), seconds, stats.num_calls, stats.num_prompt, stats.num_encoded)


def _result(values: dict[str, Any]) -> Any:
    return values if len(values) > 1 else next(iter(values.values()))


_CHOREO = partial(planned, mode="choreo", semantics="choreo")

SERVED = "LangGraph"  # the way that asks for a server
RIVALS: dict[str, Way] = {
    "query by query": partial(as_text, runner=query_by_query),
    "operator by operator": partial(as_text, runner=operator_by_operator),
    "as they come": partial(as_text, runner=partial(dataflow, choose=first_come)),
    "longest shared prefix": partial(as_text, runner=partial(dataflow, choose=longest_shared)),
    "an agent at a time": partial(as_text, runner=partial(dataflow, choose=agent_at_a_time)),
    "gangs by prefix": partial(as_text, runner=partial(dataflow, choose=gangs_by_prefix)),
    "LangGraph, in process": partial(as_text, runner=langgraph),
    SERVED: partial(as_text, runner=langgraph, opened=served),
}
PLANS: dict[str, Way] = {
    "plan, exact, text": partial(planned, mode="baseline"),
    "plan, exact, text, no blocks": partial(planned, mode="baseline", without=["fit"]),
    "plan, exact, messages": partial(planned, mode="choreo"),
    "plan, choreographed": _CHOREO,
}
# What the choreographed plan takes without one of its parts.
ABLATIONS: dict[str, Way] = {
    "without warming": partial(_CHOREO, without=["warm"]),
    "without the answer cache": partial(_CHOREO, caches=False),
    "without merging": partial(_CHOREO, without=["merge"]),
    "without a schedule": partial(_CHOREO, without=["nest", "schedule"]),
    "without message reuse": partial(_CHOREO, without=["choose", "continue_chats", "cut"]),
}
WAYS = {**RIVALS, **PLANS, **ABLATIONS}
SWEPT = (SERVED, "plan, exact, messages", "plan, choreographed")

# SPDX-License-Identifier: Apache-2.0
"""Physical plan: how prompts are read, which worker runs which call, and in which order."""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_choreo.planner.logical.expand import (
    LogicalPlan,
    call_dependencies,
    no_collection,
    structure_keys,
)
from vllm_choreo.planner.logical.nodes import SOURCES
from vllm_choreo.planner.logical.values import CHATML, Template
from vllm_choreo.planner.physical.choose import Choice, choose
from vllm_choreo.planner.physical.cost import Calls, CostModel, Timetable, timetable
from vllm_choreo.planner.physical.place import place
from vllm_choreo.planner.physical.profile import Profile
from vllm_choreo.planner.physical.prompts import (
    Cuts,
    call_symbols,
    cuts,
    going_on,
    operator_symbols,
    read_apart,
)
from vllm_choreo.planner.physical.radix import Symbol, TemplatedRadixTree, estimated_tokens
from vllm_choreo.planner.physical.schedule import schedule

# Up to so many calls are scheduled one by one, beside the schedule of operators.
_SINGLE_UP_TO = 2000
_LONG_PREFIX = 16.0  # tokens that operators of one inner sequence must share


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan.

    Attributes:
        semantics: "exact" or "choreo".
        num_workers: number of workers.
        cost: the cost model.
        profile: lengths of answers.
        template: chat template of the model.
        schedule: order calls by the plan; else as they become ready.
        reuse: share prefixes and read answers as messages; else each call encodes its prompt.
        repaired: tokens that are repaired at the beginning of each message.
    """

    semantics: str = "exact"
    num_workers: int = 1
    cost: CostModel = field(default_factory=CostModel)
    profile: Profile = field(default_factory=Profile)
    template: Template = CHATML
    schedule: bool = True
    reuse: bool = True
    repaired: float = 0.0


@dataclass
class PhysicalPlan:
    """Plan of a batch on workers.

    Attributes:
        logical: the tasks.
        prompts: symbols of each call's prompt.
        cuts: places at which shared prefixes of prompts end.
        choices: ways of reading, by (operator, operator that it reads).
        goes_on: call with whose prompt and answer the prompt of a call of an exact plan begins, by
            that call: if its message is there, it is read, with the parents that it has read.
        calls: scheduled calls, with the tree of their prompts.
        table: estimated times of the calls.
        worker: number of the worker of each call.
        rank: place of each call on its worker; the runtime may take a later one that can run.
        sequences: nested sequences of operators of each worker: the calls of an inner one run query
            by query; the inner ones follow one another.
        seconds: time that planning took.
    """

    logical: LogicalPlan
    prompts: dict[int, list[Symbol]]
    cuts: Cuts
    choices: dict[tuple[int, int], Choice]
    goes_on: dict[int, int]
    calls: Calls
    table: Timetable
    worker: dict[int, int]
    rank: dict[int, int]
    sequences: list[list[list[int]]]
    seconds: float = 0.0

    def reads_message(self, call: int, symbol: int) -> bool:
        """Return whether a call reads the value of another task as a message."""
        tasks = self.logical.tasks
        return _is_message(self.choices, tasks[call].node, tasks[symbol].node)

    def behind_chain(self, call: int) -> list[str | None]:
        """Symbols of a prompt behind its chain of shared prefixes; None: read as a message."""
        found: list[str | None] = []
        for symbol in self.prompts[call]:
            if isinstance(symbol, str):
                found.append(symbol)
            elif self.reads_message(call, symbol):
                found.append(None)
            else:
                found.append(f"<{symbol}>")  # not known yet: the same for those that read it
        first = found.index(None) if None in found else len(found)
        links = [cut for cut in self.cuts.at.get(call, ()) if cut < first]
        return found[links[-1] + 1 :] if links else found


@no_collection()
def physical_plan(logical: LogicalPlan, options: PlanOptions) -> PhysicalPlan:
    """Plan the calls of a logical plan whose answers are not known."""
    begun = time.perf_counter()
    graph = logical.graph
    sizes = _sizes(logical, options.profile)
    operators = operator_symbols(graph, options.template)
    live = {logical.tasks[call].node for call in logical.calls()}
    operators = {number: symbols for number, symbols in operators.items() if number in live}
    choices: dict[tuple[int, int], Choice] = {}
    if options.reuse:
        choices = choose(graph, operators, options.semantics, sizes.__getitem__, options.repaired)
    apart: Collection[int] = ()
    if any(choice.how == "message" for choice in choices.values()):
        apart = read_apart(logical, options.template, partial(_is_message, choices))
    prompts = call_symbols(logical, options.template, apart)
    found, goes_on = Cuts(), {}
    if options.reuse:
        goes_on = going_on(prompts) if options.semantics == "exact" else {}
        found = cuts(
            prompts,
            operators,
            options.template,
            anywhere=options.semantics == "choreo",
            weigh=lambda task: sizes[logical.tasks[task].node],
        )
    calls = _calls(logical, prompts, sizes)
    table, sequences = _scheduled(logical, calls, operators, sizes, options)
    plan = PhysicalPlan(logical, prompts, found, choices, goes_on, calls, table, {}, {}, sequences)
    for worker, order in enumerate(table.orders):
        for rank, call in enumerate(order):
            plan.worker[call], plan.rank[call] = worker, rank
    plan.seconds = time.perf_counter() - begun
    return plan


def _sizes(logical: LogicalPlan, profile: Profile) -> list[float]:
    """Tokens of each operator's value: measured on given texts, else expected by the profile."""
    sizes = profile.expected(logical.graph)
    given: dict[int, list[float]] = {}
    for task, value in logical.known.items():
        number = logical.tasks[task].node
        if isinstance(value, str) and logical.graph.nodes[number].kind in SOURCES:
            given.setdefault(number, []).append(estimated_tokens(value))
    for number, found in given.items():
        sizes[number] = sum(found) / len(found)
    return sizes


def _is_message(choices: Mapping[tuple[int, int], Choice], reader: int, writer: int) -> bool:
    """Return whether an operator reads another one's value as a message."""
    choice = choices.get((reader, writer))
    return choice is not None and choice.how == "message"


def _calls(
    logical: LogicalPlan, prompts: Mapping[int, Sequence[Symbol]], sizes: Sequence[float]
) -> Calls:
    """Order the calls, the same way however the graph is written and its queries are ordered."""
    depends = call_dependencies(logical, list(prompts))
    levels: dict[int, int] = {}
    for call in sorted(prompts):
        levels[call] = 1 + max((levels[other] for other in depends[call]), default=0)
    keys = structure_keys(logical)
    order = sorted(prompts, key=lambda call: (levels[call], keys[call], call))
    tree = TemplatedRadixTree(lambda task: sizes[logical.tasks[task].node])
    for call in order:
        tree.add(call, prompts[call])
    num_out = {call: sizes[logical.tasks[call].node] for call in order}
    places = {call: place for place, call in enumerate(order)}
    ordered = {call: tuple(sorted(depends[call], key=places.__getitem__)) for call in order}
    return Calls(tree, num_out, ordered)


# -- operators in nested sequences -----------------------------------------------------------------


def _scheduled(
    logical: LogicalPlan,
    calls: Calls,
    operators: Mapping[int, Sequence[Symbol]],
    sizes: Sequence[float],
    options: PlanOptions,
) -> tuple[Timetable, list[list[list[int]]]]:
    """Choose the better of two: a schedule of operators, spread over the queries, or of calls."""
    assigned = place(calls, options.num_workers, options.cost)
    if not options.schedule:
        return timetable(calls, assigned, options.cost), []
    nested = _sequences(logical, calls, operators, sizes, options.cost)
    worker = {call: number for number, mine in enumerate(assigned) for call in mine}
    orders: list[list[int]] = [[] for _ in assigned]
    for call in _spread(logical, calls, nested):
        orders[worker[call]].append(call)
    sequences = [_of_worker(logical, order, nested) for order in orders]
    best = timetable(calls, orders, options.cost)
    if len(calls.num_out) <= _SINGLE_UP_TO:
        single = schedule(calls, assigned, options.cost)
        best = min(single, best, key=lambda table: table.total)
    return best, sequences


def _sequences(
    logical: LogicalPlan,
    calls: Calls,
    operators: Mapping[int, Sequence[Symbol]],
    sizes: Sequence[float],
    model: CostModel,
) -> list[list[int]]:
    """Operators in inner sequences: those that begin with the same static text together."""
    times: dict[int, float] = {}
    depends: dict[int, set[int]] = {}
    for call in calls.num_out:
        number = logical.tasks[call].node
        times[number] = times.get(number, 0.0) + 1.0
        before = {logical.tasks[other].node for other in calls.depends[call]}
        depends.setdefault(number, set()).update(before - {number})
    tree = TemplatedRadixTree(sizes.__getitem__)
    for number in times:
        tree.add(number, operators[number])
    whole = Calls(
        tree,
        {number: sizes[number] for number in times},
        {number: tuple(sorted(before)) for number, before in depends.items()},
        times,
    )
    (order,) = schedule(whole, [list(times)], model, improve=False).orders
    nested: list[list[int]] = []
    for number in order:
        if nested and _same_static(tree, nested[-1][-1], number):
            nested[-1].append(number)
        else:
            nested.append([number])
    return nested


def _same_static(tree: TemplatedRadixTree, one: int, other: int) -> bool:
    """Return whether two operators share a static prefix of at least 16 tokens."""
    shared = 0.0
    for mine, theirs in zip(tree.end[one].path(), tree.end[other].path(), strict=False):
        if mine is not theirs or not isinstance(mine.symbol, str):
            break
        shared += mine.weight
    return shared >= _LONG_PREFIX


def _spread(logical: LogicalPlan, calls: Calls, nested: list[list[int]]) -> list[int]:
    """Order the calls by their operators: query by query within an inner sequence.

    A task that queries share is run for the first of them, so a call may have to be put back behind
    those on which it depends.
    """
    place_of = {number: (i, j) for i, inner in enumerate(nested) for j, number in enumerate(inner)}
    homes = _homes(logical)
    ranks = {}
    for position, call in enumerate(calls.num_out):
        outer, inner = place_of[logical.tasks[call].node]
        ranks[call] = (outer, homes[call], inner, position, call)
    missing = {call: len(calls.depends[call]) for call in calls.num_out}
    dependents = calls.dependents()
    free = [ranks[call] for call, count in missing.items() if not count]
    heapq.heapify(free)
    order = []
    while free:
        call = heapq.heappop(free)[-1]
        order.append(call)
        for other in dependents[call]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(free, ranks[other])
    return order


def _homes(logical: LogicalPlan) -> dict[int, int]:
    """Rank of the first query that needs each task, queries ordered by their results' structure."""
    keys = structure_keys(logical)
    order = sorted(
        range(logical.batch_size),
        key=lambda query: [keys[task] for task in logical.outputs[query].values()],
    )
    homes: dict[int, int] = {}
    for rank, query in enumerate(order):
        stack = list(logical.outputs[query].values())
        while stack:
            task = stack.pop()
            if task not in homes:
                homes[task] = rank
                stack += logical.tasks[task].inputs
    return homes


def _of_worker(
    logical: LogicalPlan, order: Sequence[int], nested: list[list[int]]
) -> list[list[int]]:
    """Inner sequences, cut down to the operators that a worker runs."""
    here = {logical.tasks[call].node for call in order}
    mine = [[number for number in inner if number in here] for inner in nested]
    return [inner for inner in mine if inner]

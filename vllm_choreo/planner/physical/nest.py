# SPDX-License-Identifier: Apache-2.0
"""Order of calls by their operators, which run query by query where they share static text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_choreo.planner.logical.topology import in_order
from vllm_choreo.planner.physical.cost import Calls
from vllm_choreo.planner.physical.radix import TemplatedRadixTree
from vllm_choreo.planner.physical.schedule import order_calls
from vllm_choreo.planner.plan import Plan

_LONG_PREFIX = 16.0  # tokens that operators of one inner sequence must share


def nest(plan: Plan) -> Plan:
    """Order the calls of each worker as their operators are ordered, in nested sequences."""
    nested = _nested(plan)
    orders: list[list[int]] = [[] for _ in plan.table.orders]
    for call in _spread(plan, nested):
        orders[plan.worker[call]].append(call)
    table = plan.calls.timetable(orders, plan.target.cost)
    return replace(plan, table=table, sequences=[_here(plan, order, nested) for order in orders])


def _nested(plan: Plan) -> list[list[int]]:
    """Operators in inner sequences: those that begin with the same static text together."""
    times: dict[int, float] = {}
    depends: dict[int, set[int]] = {}
    for call in plan.calls.num_out:
        number = plan.tasks[call].node
        times[number] = times.get(number, 0.0) + 1.0
        before = {plan.tasks[other].node for other in plan.calls.depends[call]}
        depends.setdefault(number, set()).update(before - {number})
    whole = Calls(
        plan.operator_tree,
        {number: plan.sizes[number] for number in times},
        {number: tuple(sorted(before)) for number, before in depends.items()},
        times,
    )
    (order,) = order_calls(whole, [list(times)], plan.target.cost, improve=False).orders
    nested: list[list[int]] = []
    for number in order:
        if nested and _same_static(plan.operator_tree, nested[-1][-1], number):
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


def _spread(plan: Plan, nested: list[list[int]]) -> list[int]:
    """Order the calls by their operators: query by query within an inner sequence.

    A task that queries share is run for the first of them, so a call may have to be put back behind
    those on which it depends.
    """
    place_of = {number: (i, j) for i, inner in enumerate(nested) for j, number in enumerate(inner)}
    homes = query_ranks(plan)
    ranks = {}
    for position, call in enumerate(plan.calls.num_out):
        outer, inner = place_of[plan.tasks[call].node]
        ranks[call] = (outer, homes[call], inner, position)
    return in_order(plan.calls.depends, ranks.__getitem__)


def query_ranks(plan: Plan) -> dict[int, int]:
    """Rank of the first query that needs each task, queries ordered by their results' structure."""
    order = sorted(
        range(plan.batch.batch_size),
        key=lambda query: [plan.keys[task] for task in plan.outputs[query].values()],
    )
    homes: dict[int, int] = {}
    for rank, query in enumerate(order):
        stack = list(plan.outputs[query].values())
        while stack:
            task = stack.pop()
            if task not in homes:
                homes[task] = rank
                stack += plan.tasks[task].inputs
    return homes


def _here(plan: Plan, order: Sequence[int], nested: list[list[int]]) -> list[list[int]]:
    """Inner sequences, cut down to the operators that a worker runs."""
    here = {plan.tasks[call].node for call in order}
    mine = [[number for number in inner if number in here] for inner in nested]
    return [inner for inner in mine if inner]

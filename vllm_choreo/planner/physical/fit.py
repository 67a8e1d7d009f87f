# SPDX-License-Identifier: Apache-2.0
"""Order of calls where their prompts do not fit a worker's KV cache: some queries after others.

What the schedule shares lies between neighbours. A prompt that goes on where an earlier one of its
query ended finds that only if what was encoded meanwhile has left it there. So queries are taken
in blocks: of the calls that can run, one of the earliest block comes first. The smaller the blocks,
the less lies between a query's calls, and the longer the last queries run alone: the model of an
engine says which size is best. Where all fits, no order encodes less than another: no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vllm_choreo.planner.physical.cost import Calls, EngineModel
from vllm_choreo.planner.physical.nest import query_ranks
from vllm_choreo.planner.physical.pool import ModelEngine, by_rank, working_set
from vllm_choreo.planner.plan import Plan

# Up to so many calls of one worker the sizes of blocks are tried.
_TRIED_UP_TO = 2000
# An order of blocks must be better by this, for the model of the engine is a rough one.
_WORTHWHILE = 0.02


def fit(plan: Plan) -> Plan:
    """Put calls into blocks of queries, the same on all workers, where the model is faster so."""
    model, orders = plan.target.cost.engine, plan.table.orders
    if model is None or len(plan.calls.num_out) > _TRIED_UP_TO:
        return plan
    parts = [plan.calls.restricted(order) for order in orders]
    if all(working_set(part) <= model.capacity for part in parts):
        return plan
    best, least = None, _total(parts, orders, model) * (1 - _WORTHWHILE)
    for place in _places(plan):
        blocks = [sorted(order, key=place.__getitem__) for order in orders]
        found = _total(parts, blocks, model)
        if found < least:
            best, least = blocks, found
    if best is None:
        return plan
    return replace(plan, table=plan.calls.timetable(best, plan.target.cost))


def _places(plan: Plan) -> Iterator[dict[int, tuple[int, ...]]]:
    """Yield places of calls in blocks of 1, 2, 4 and so on queries, up to all.

    Within a block calls stand as they do in the plan, or operator by operator as these are written:
    a workflow whose branches are written one after the other ends one before it begins the next.
    """
    queries, rank, size = query_ranks(plan), plan.rank, 1
    while size < 2 * plan.batch.batch_size:
        yield {call: (queries[call] // size, rank[call]) for call in rank}
        yield {call: (queries[call] // size, plan.tasks[call].node, queries[call]) for call in rank}
        size *= 2


def _total(parts: Sequence[Calls], orders: Sequence[Sequence[int]], model: EngineModel) -> float:
    """Time of the slowest worker by the model of an engine; infinite if a call does not fit."""
    totals = [0.0]
    for part, order in zip(parts, orders, strict=True):
        ranks = {call: (float(place),) for place, call in enumerate(order)}
        try:
            totals.append(ModelEngine(part, model).run(by_rank(ranks)).total)
        except ValueError:
            return float("inf")
    return max(totals)

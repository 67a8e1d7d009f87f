# SPDX-License-Identifier: Apache-2.0
"""Runs of the same calls in all orders, on the model of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.planner.pressure.orders import ORDERS
from vllm_choreo.planner import CompiledGraph, CostModel, EngineModel, Profile
from vllm_choreo.planner.physical.pool import (
    ModelEngine,
    PoolRun,
    least_encoded,
    working_set,
)
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Plan, Target

# Steps in the time of encoding one token, and seconds of that time. Assumed: weights of an 8B model
# are 16 GB, which 3.3 TB/s read once a step, and 600 TFLOP/s encode; the small model encodes a
# token in 1.7 ms here, and with 16 calls decodes about 350 tokens a second.
MACHINES = {
    "8B, one H100": (EngineModel(0.0, step=200.0, decode=1.0), 3.0e-5),
    "135M, two cores": (EngineModel(0.0, step=4.0, decode=2.5), 1.7e-3),
}
WIDTH = 16  # calls at a time, where nothing is said


class OrderedRun(NamedTuple):
    """Calls in one order.

    Attributes:
        way: how the next call is chosen.
        num_calls: calls of the workflow.
        capacity: tokens of the KV cache.
        best_hit_rate: part of the prompt tokens that the best order could have found.
        ran: measurements of the model.
    """

    way: str
    num_calls: int
    capacity: float
    best_hit_rate: float
    ran: PoolRun


def runs(
    batch: CompiledGraph, machine: str, share: float, width: int = WIDTH
) -> Iterator[OrderedRun]:
    """Run a batch in each order, in a pool that holds this share of all prompts and answers.

    Args:
        machine: one of `MACHINES`.
        width: calls at a time, at most.
    """
    plain = _planned(batch, None)
    calls = plain.calls
    largest = max(calls.tree.total(call) + calls.num_out[call] for call in calls.num_out)
    capacity = max(share * working_set(calls), 2 * largest)
    model = replace(MACHINES[machine][0], capacity=capacity, width=width)
    plans = {**dict.fromkeys(ORDERS, plain), "plan, in blocks": _planned(batch, model)}
    best = 1.0 - least_encoded(calls) / sum(calls.tree.total(call) for call in calls.num_out)
    for way, plan in plans.items():
        ran = ModelEngine(plan.calls, model).run(ORDERS.get(way, ORDERS["plan"])(plan))
        yield OrderedRun(way, len(calls.num_out), model.capacity, best, ran)


def _planned(batch: CompiledGraph, model: EngineModel | None) -> Plan:
    """A plan that knows how long answers are, and what its engine holds."""
    profile = Profile()
    for node in batch.graph.nodes:
        if node.kind == "llm":
            profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
    without = frozenset({"merge"})
    return make_plan(batch, Target(cost=CostModel(engine=model), profile=profile, without=without))

# SPDX-License-Identifier: Apache-2.0
"""The way of a batch to its plan: passes, one after the other; `plan.py` draws them."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vllm_choreo.planner.logical.expand import expand
from vllm_choreo.planner.logical.fetch import demand
from vllm_choreo.planner.logical.nodes import BoundGraph
from vllm_choreo.planner.physical.choose import choose
from vllm_choreo.planner.physical.cut import cut
from vllm_choreo.planner.physical.estimate import estimate
from vllm_choreo.planner.physical.fit import fit
from vllm_choreo.planner.physical.gather import gather
from vllm_choreo.planner.physical.nest import nest
from vllm_choreo.planner.physical.place import place
from vllm_choreo.planner.physical.prompts import continue_chats, spell_calls, spell_operators
from vllm_choreo.planner.physical.schedule import schedule
from vllm_choreo.planner.plan import Pass, Plan, Target

LOGICAL: tuple[Pass, ...] = (expand, demand)
PHYSICAL: tuple[Pass, ...] = (
    *(estimate, spell_operators, choose, spell_calls, continue_chats, cut),
    *(gather, place, nest, schedule, fit),
)


def make_plan(batch: BoundGraph, target: Target, recall: Sequence[Pass] = ()) -> Plan:
    """Plan a batch.

    Args:
        batch: the graph and its inputs.
        target: semantics, workers and costs that the plan is made for.
        recall: passes that add values which are known already: of a journal, of a cache.
    """
    begun = time.perf_counter()
    plan = run_passes(Plan(batch, target), (expand, *recall, demand, *PHYSICAL))
    return replace(plan, seconds=time.perf_counter() - begun)


def run_passes(plan: Plan, passes: Sequence[Pass]) -> Plan:
    """Run passes one after the other, but those that the target leaves out."""
    with _no_collection():
        for run in passes:
            if getattr(run, "__name__", "") not in plan.target.without:
                plan = run(plan)
    return plan


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn Python's cyclic garbage collector off while a plan is made.

    A plan makes many objects, all of which stay, and each collection looks at all that there are.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

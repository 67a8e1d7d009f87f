# SPDX-License-Identifier: Apache-2.0
"""Many simulated workers: the load is balanced, prompts are shared, and no step grows too fast."""

from __future__ import annotations

import time

import pytest

from tests.planner.test_schedule import desk
from vllm_choreo.planner import CostModel
from vllm_choreo.planner.execute.simulate import Simulation, simulate
from vllm_choreo.planner.logical.expand import logical_plan
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.physical.plan import PhysicalPlan, PlanOptions, physical_plan

MODEL = CostModel(capacity=32_768.0)


def run(compiled: CompiledGraph, workers: int) -> tuple[PhysicalPlan, Simulation, dict[str, float]]:
    """A plan, its simulation, and the seconds that each step took."""
    seconds, clock = {}, time.process_time()

    def lap(step: str) -> None:
        nonlocal clock
        seconds[step], clock = time.process_time() - clock, time.process_time()

    logical = logical_plan(compiled)
    lap("logical")
    plan = physical_plan(logical, PlanOptions(num_workers=workers, cost=MODEL))
    lap("physical")
    simulation = simulate(plan, MODEL)
    lap("run")
    return plan, simulation, seconds


def check(plan: PhysicalPlan, simulation: Simulation, num_queries: int) -> None:
    assert simulation.num_calls == len(plan.prompts)
    done = simulation.progress.values
    assert all(task in done for outputs in plan.logical.outputs for task in outputs.values())
    assert len(plan.logical.outputs) == num_queries and not simulation.progress.errors


@pytest.mark.parametrize(("workers", "num_queries"), [(1, 4), (8, 64), (20, 100)])
def test_workers_share_the_load_and_the_prompts(workers: int, num_queries: int) -> None:
    compiled = desk(num_queries)
    plan, simulation, _ = run(compiled, workers)
    check(plan, simulation, num_queries)
    assert simulation.balance < 1.1
    _, alone, _ = run(compiled, 1)
    # Calls that share a beginning stay together: little is lost by dividing them.
    assert simulation.hit_rate > 0.9 * alone.hit_rate > 0.05


@pytest.mark.exhaustive
def test_two_hundred_workers_and_a_hundred_thousand_calls() -> None:
    part, whole = 170, 1360
    _, _, before = run(desk(part), 200)
    plan, simulation, after = run(desk(whole), 200)
    check(plan, simulation, whole)
    assert len(plan.prompts) >= 100_000
    assert simulation.balance < 1.1 and simulation.hit_rate > 0.05
    for step, seconds in after.items():  # twice the calls, three times over: little more than twice
        assert seconds < 2.6**3 * before[step] + 0.5, (step, before, after)

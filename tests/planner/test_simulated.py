# SPDX-License-Identifier: Apache-2.0
"""Many simulated workers: the load is balanced, prompts are shared, and no step grows too fast."""

from __future__ import annotations

import time

import pytest

from tests.planner.test_schedule import desk
from vllm_choreo.planner import CostModel
from vllm_choreo.planner.execute.simulate import Simulation, simulate
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.pipeline import LOGICAL, PHYSICAL, run_passes
from vllm_choreo.planner.plan import Plan, Target

MODEL = CostModel(capacity=32_768.0)


def run(compiled: CompiledGraph, workers: int) -> tuple[Plan, Simulation, dict[str, float]]:
    """A plan, its simulation, and the seconds that each step took."""
    seconds, clock = {}, time.process_time()

    def lap(step: str) -> None:
        nonlocal clock
        seconds[step], clock = time.process_time() - clock, time.process_time()

    plan = run_passes(Plan(compiled, Target(num_workers=workers, cost=MODEL)), LOGICAL)
    lap("logical")
    plan = run_passes(plan, PHYSICAL)
    lap("physical")
    simulation = simulate(plan, MODEL)
    lap("run")
    return plan, simulation, seconds


def check(plan: Plan, simulation: Simulation, num_queries: int) -> None:
    assert simulation.num_calls == len(plan.prompts)
    done = simulation.progress.values
    assert all(task in done for outputs in plan.outputs for task in outputs.values())
    assert len(plan.outputs) == num_queries and not simulation.progress.errors


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

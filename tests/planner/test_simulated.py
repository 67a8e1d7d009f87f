# SPDX-License-Identifier: Apache-2.0
"""Many simulated workers: the load is balanced, prompts are shared, and no step grows too fast."""

from __future__ import annotations

import cProfile

import pytest

from tests.grids import sampled
from tests.planner.test_schedule import desk
from vllm_choreo.planner import CostModel
from vllm_choreo.planner.execute.simulate import Simulation, simulate
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.pipeline import LOGICAL, PHYSICAL, run_passes
from vllm_choreo.planner.plan import Plan, Target

MODEL = CostModel(capacity=32_768.0)


def run(compiled: CompiledGraph, workers: int) -> tuple[Plan, Simulation]:
    """A plan and its simulation."""
    planned = run_passes(_target(compiled, workers), (*LOGICAL, *PHYSICAL))
    return planned, simulate(planned, MODEL)


def num_function_calls(compiled: CompiledGraph, workers: int) -> dict[str, int]:
    """How many functions each step calls: its work, whatever else the machine does."""
    plan = _target(compiled, workers)
    steps = {"logical": LOGICAL, "physical": PHYSICAL}
    counts = {}
    for step, passes in steps.items():
        with cProfile.Profile() as profile:
            plan = run_passes(plan, passes)
        counts[step] = _num_calls(profile)
    with cProfile.Profile() as profile:
        simulate(plan, MODEL)
    return {**counts, "run": _num_calls(profile)}


def _num_calls(profile: cProfile.Profile) -> int:
    return sum(entry.callcount for entry in profile.getstats())


def _target(compiled: CompiledGraph, workers: int) -> Plan:
    return Plan(compiled, Target(num_workers=workers, cost=MODEL))


def check(plan: Plan, simulation: Simulation, num_queries: int) -> None:
    assert simulation.num_calls == len(plan.prompts)
    done = simulation.progress.values
    assert all(task in done for outputs in plan.outputs for task in outputs.values())
    assert len(plan.outputs) == num_queries and not simulation.progress.errors


@pytest.mark.parametrize("size", sampled([(1, 4), (8, 64), (20, 100)], 2), ids=str)
def test_workers_share_the_load_and_the_prompts(size: tuple[int, int]) -> None:
    workers, num_queries = size
    compiled = desk(num_queries)
    plan, simulation = run(compiled, workers)
    check(plan, simulation, num_queries)
    assert simulation.balance < 1.1
    _, alone = run(compiled, 1)
    # Calls that share a beginning stay together: little is lost by dividing them.
    assert simulation.hit_rate > 0.9 * alone.hit_rate > 0.05


@pytest.mark.exhaustive
def test_two_hundred_workers_and_a_hundred_thousand_calls() -> None:
    num_queries = 1360
    plan, simulation = run(desk(num_queries), 200)
    check(plan, simulation, num_queries)
    assert len(plan.prompts) >= 100_000
    assert simulation.balance < 1.1 and simulation.hit_rate > 0.05
    part, whole = (num_function_calls(desk(num_queries // parts), 200) for parts in (8, 2))
    for step, count in whole.items():
        assert count < 5 * part[step], "four times the calls: little more than four times the work"

# SPDX-License-Identifier: Apache-2.0
"""Orders on the model of an engine: their course, and the tables of the paper's comparisons."""

from __future__ import annotations

import pytest

from benchmarks.planner.pressure.course import course
from benchmarks.planner.pressure.tables import TABLES, WAYS
from vllm_choreo.planner.physical.pool import PoolRun


def test_a_course_has_the_means_of_equal_parts() -> None:
    # From 0 to 3 two calls of 10 tokens, from 3 to 4 none, from 4 to 8 one of 6.
    steps = [(0.0, 1.0, 2, 10.0), (1.0, 2.0, 2, 10.0), (4.0, 4.0, 1, 6.0)]
    ran = PoolRun(total=8.0, steps=steps)
    found = [(part["batch"], part["batch_tokens"]) for part in course(ran, 4)]
    assert found == [(2.0, 10), (1.0, 5), (1.0, 6), (1.0, 6)]
    for num_parts in (1, 3, 7):
        parts = course(ran, num_parts)
        mean = sum(part["batch"] for part in parts) / num_parts
        assert mean == pytest.approx(10 / 8, abs=0.01)


def test_strategies_are_compared_with_the_plan_in_blocks() -> None:
    seconds = dict.fromkeys(WAYS, 20.0) | {"plan, in blocks": 10.0}
    hits = dict.fromkeys(WAYS, 0.3) | {"plan, in blocks": 0.4}
    about = {"workflow": "trading", "machine": "8B, one H100", "pool": "0.5", "batch": "9.5"}
    rows = [
        {**about, "way": way, "seconds": str(seconds[way]), "hit_rate": str(hits[way])}
        for way in WAYS
    ]
    other = [{**row, "pool": "0.25", "seconds": "1"} for row in rows]
    lines = TABLES["planner_strategies"].markdown([*other, *rows]).splitlines()
    assert len(lines) == 2 + len(WAYS)
    assert lines[2] == f"| {WAYS[0]} | 20.0 | 2.00 | 30.0 | -25.0 % | 9.5 |"
    assert lines[-1] == "| plan, in blocks | 10.0 | 1.00 | 40.0 | +0.0 % | 9.5 |"
    assert len(TABLES["planner_memory"].markdown([*other, *rows]).splitlines()) == 4

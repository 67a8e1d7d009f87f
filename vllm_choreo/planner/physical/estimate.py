# SPDX-License-Identifier: Apache-2.0
"""Estimate of the tokens of each operator's value."""

from __future__ import annotations

from dataclasses import replace

from vllm_choreo.planner.logical.nodes import SOURCES
from vllm_choreo.planner.logical.values import as_text
from vllm_choreo.planner.plan import Plan


def estimate(plan: Plan) -> Plan:
    """Measure given texts, and expect of all other operators what the profile says."""
    sizes = plan.target.profile.expected(plan.graph)
    given: dict[int, list[float]] = {}
    for task, value in plan.known.items():
        if plan.node(task).type in ("text", "messages") and plan.node(task).kind in SOURCES:
            text = as_text(value, plan.target.turns)
            given.setdefault(plan.tasks[task].node, []).append(plan.weigh(text))
    for number, found in given.items():
        sizes[number] = sum(found) / len(found)
    return replace(plan, sizes=sizes)

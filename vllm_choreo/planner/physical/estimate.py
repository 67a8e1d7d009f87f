# SPDX-License-Identifier: Apache-2.0
"""Estimate of the tokens of each operator's value, and of each task's."""

from __future__ import annotations

from dataclasses import replace

from vllm_choreo.planner.logical.values import as_text
from vllm_choreo.planner.plan import Plan

_TEXTS = ("text", "messages")


def estimate(plan: Plan) -> Plan:
    """Measure the texts that are known, and expect of all other operators what the profile says."""
    turns, given = plan.target.turns, {}
    for number, values in plan.batch.inputs.items():
        if plan.graph.nodes[number].type in _TEXTS:
            # Of an input and not of its tasks, for what two inputs have alike is the task of one.
            sizes = [plan.weigh(text) for text in {as_text(value, turns) for value in values}]
            given[number] = sum(sizes) / len(sizes)
    known = {
        task: plan.weigh(as_text(value, turns))
        for task, value in plan.known.items()
        if plan.node(task).type in _TEXTS
    }
    expected = plan.target.profile.expected(plan.graph, given)
    return replace(plan, sizes=expected, known_sizes=known)

# SPDX-License-Identifier: Apache-2.0
"""Values that are known before a run, and the tasks that are needed for all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.nodes import Node, Value
from vllm_choreo.planner.logical.values import evaluate
from vllm_choreo.planner.plan import Plan


def fetch(plan: Plan, probe: Callable[[Node, Sequence[Value]], tuple[bool, Value]]) -> Plan:
    """Add the values that a cache has, and all that follows from them, from the inputs up.

    Args:
        plan: tasks, and the values that are known already.
        probe: look-up of a deterministic `llm` or `fn` by the node and the values of its inputs;
            returns (found, its value).
    """
    known, num_fetched = dict(plan.known), plan.num_fetched
    for number, task in enumerate(plan.tasks):
        node = plan.node(number)
        if number in known or any(given not in known for given in task.inputs):
            continue
        inputs = [known[given] for given in task.inputs]
        if node.kind in ("llm", "fn"):
            found, value = probe(node, inputs) if node.deterministic else (False, None)
            if found:
                known[number] = value
                num_fetched += 1
            continue
        try:
            known[number] = evaluate(node, inputs)
        except GraphError:
            continue  # it is raised when the task is run, for the queries that need it
    return replace(plan, known=known, num_fetched=num_fetched)


def demand(plan: Plan) -> Plan:
    """Find the tasks that outputs may need, and those of them that call the model."""
    needed: set[int] = set()
    stack = [task for outputs in plan.outputs for task in outputs.values()]
    while stack:
        task = stack.pop()
        if task not in needed:
            needed.add(task)
            if task not in plan.known:
                stack += plan.tasks[task].inputs
    asked = sorted(t for t in needed if t not in plan.known and plan.node(t).kind == "llm")
    return replace(plan, needed=frozenset(needed), asked=asked)

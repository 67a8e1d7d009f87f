# SPDX-License-Identifier: Apache-2.0
"""Choice of how operators read the values that are filled in, edge by edge, by cost.

    prefix    the prompt up to here is a message that several calls read; exact, so that nothing
              before it is read as a message
    message   an answer is read where its writer's call left it, and text that prompts have behind
              different beginnings is encoded once, by itself; not exact
    again     it is encoded again, with the text around it; exact

Before anything is chosen, texts without a fixed order (`concat(order="any")`) have got the order in
which prompts share most, so that more can be read as a `prefix`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from vllm_choreo.planner.logical.nodes import Operators
from vllm_choreo.planner.logical.rows import CHOOSERS
from vllm_choreo.planner.physical.radix import Symbol
from vllm_choreo.planner.plan import Choice, Plan

SEMANTICS = ("exact", "choreo")
# To read a message costs the engine bookkeeping, and a shared beginning is a request of its own: in
# tokens that are encoded in that time. Measured with SmolLM2-135M on 2 cores: 1 ms for each message
# that a call reads, and 1.5 to 2 ms for a token; texts between messages are encoded once for all.
MESSAGE_OVERHEAD = 2.0


def choose(plan: Plan) -> Plan:
    """Choose the way of each edge, (operator, operator that it reads)."""
    num_readers: Counter[Symbol] = Counter()
    for symbols in plan.operators.values():
        num_readers.update(set(symbols))
    choices: dict[tuple[int, int], Choice] = {}
    for number in plan.operators:
        shared = True  # a beginning: behind a message there is none
        for node in plan.operator_tree.end[number].path():
            if not isinstance(node.symbol, int) or (number, node.symbol) in choices:
                continue
            served = node.num_leaves if shared else 1
            costs = _costs(plan, node.symbol, served, num_readers[node.symbol])
            how = min(costs, key=lambda way: costs[way])
            choices[number, node.symbol] = Choice(how, costs, node.num_leaves)
            shared = shared and how != "message"
    return replace(plan, choices=choices)


def _costs(plan: Plan, read: int, served: int, readers: int) -> dict[str, float]:
    """Tokens to be encoded per call, by possible way to read an operator's value.

    Args:
        plan: plan with the tokens of values.
        read: number of the operator.
        served: operators whose prompts have the same prefix up to here.
        readers: operators that read it, behind whatever prefix.
    """
    size = plan.sizes[read]
    costs = {"again": size}
    if served > 1:
        costs["prefix"] = (size + MESSAGE_OVERHEAD) / served
    # What no model wrote must be encoded for it: that pays where a prefix cannot serve all.
    if plan.target.semantics == "choreo" and _writes_message(plan.graph, read):
        costs["message"] = MESSAGE_OVERHEAD
    elif plan.target.semantics == "choreo" and readers > served:
        costs["message"] = MESSAGE_OVERHEAD + size / readers
    return costs


def _writes_message(graph: Operators, number: int) -> bool:
    """Return whether the value of an operator may be an answer of the model."""
    stack, seen = [number], set()
    while stack:
        node = graph.nodes[found := stack.pop()]
        if node.kind == "llm":
            return True
        if node.kind in ("switch", "output", *CHOOSERS) and found not in seen:
            seen.add(found)
            stack += node.inputs[node.kind == "switch" :]
    return False

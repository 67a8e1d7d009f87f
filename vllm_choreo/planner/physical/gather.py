# SPDX-License-Identifier: Apache-2.0
"""Calls with their costs and dependencies, in one order however the graph is written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from vllm_choreo.planner.logical.graph_json import function_name
from vllm_choreo.planner.logical.nodes import SOURCES
from vllm_choreo.planner.physical.cost import Calls
from vllm_choreo.planner.physical.radix import TemplatedRadixTree
from vllm_choreo.planner.plan import Plan


def gather(plan: Plan) -> Plan:
    """Put the calls in order, however the graph is written and its queries are ordered."""
    depends = _dependencies(plan)
    levels: dict[int, int] = {}
    for call in plan.asked:
        levels[call] = 1 + max((levels[other] for other in depends[call]), default=0)
    keys = _structure_keys(plan)
    order = sorted(plan.asked, key=lambda call: (levels[call], keys[call], call))
    tree = TemplatedRadixTree(plan.size)
    for call in order:
        tree.add(call, plan.prompts[call])
    places = {call: place for place, call in enumerate(order)}
    ordered = {call: tuple(sorted(depends[call], key=places.__getitem__)) for call in order}
    calls = Calls(tree, {call: plan.size(call) for call in order}, ordered)
    return replace(plan, keys=keys, calls=calls)


def _dependencies(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Calls whose answers each call may read, directly or through other operators."""
    wanted = set(plan.asked)
    above: dict[int, frozenset[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    nothing: frozenset[int] = frozenset()
    for number in sorted(plan.needed):
        if number in plan.known:
            above[number] = nothing
            continue
        reads = [above.get(given, nothing) for given in plan.tasks[number].inputs]
        merged = reads[0].union(*reads[1:]) if reads else nothing
        if number in wanted:
            found[number] = tuple(sorted(merged))
            merged = frozenset((number,))
        above[number] = merged
    return found


def _structure_keys(plan: Plan) -> list[bytes]:
    """Digest of each task's operator and inputs, whatever its number.

    Calls that are sorted by it have an order that does not depend on how the graph was written.
    """
    signs = [
        json.dumps([node.kind, node.attrs], sort_keys=True, default=function_name).encode()
        for node in plan.graph.nodes
    ]
    keys: list[bytes] = []
    for number, task in enumerate(plan.tasks):
        if plan.node(number).kind in SOURCES:
            parts = [json.dumps(plan.known[number]).encode()]
        else:
            parts = [signs[task.node], *(keys[given] for given in task.inputs)]
        keys.append(hashlib.blake2b(b"|".join(parts), digest_size=12).digest())
    return keys

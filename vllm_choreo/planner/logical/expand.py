# SPDX-License-Identifier: Apache-2.0
"""Expansion of a batch to the tasks that are to be computed, once each.

Operators that no output needs are pruned, those that pass their input on are skipped; a switch
whose key is known keeps one case; identical subgraphs of deterministic operators are merged, within
a query and across queries. No rewriting changes an output: sampled answers and impure functions are
never merged.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.nodes import SOURCES, BoundGraph, Node, Operators, Value
from vllm_choreo.planner.logical.rows import CHOOSERS, read_rows
from vllm_choreo.planner.logical.values import chosen_case
from vllm_choreo.planner.plan import OpTask, Plan


def expand(plan: Plan) -> Plan:
    """Make the tasks of a batch; without "prune" and "merge", one for each operator and query."""
    graph, prune = plan.graph, "prune" not in plan.target.without
    live = sorted(_reached(graph)) if prune else range(len(graph.nodes))
    made = _Expansion(plan.batch, merge="merge" not in plan.target.without)
    signs = {number: made.sign(graph.nodes[number]) for number in live}
    passed = {number: _passed(graph.nodes[number]) if prune else None for number in live}
    outputs = []
    for query in range(plan.batch.batch_size):
        tasks: dict[tuple[int, int], int] = {}
        for number, rows in _rows(plan.batch, live, query).items():
            node = graph.nodes[number]
            for row in rows:
                read = read_rows(node, row, plan.batch.counts, plan.batch.size)
                through = 0 if node.kind in CHOOSERS else passed[number]
                if prune and node.kind == "switch":
                    through = made.known_case(node, tasks[read[0]])
                if through is not None:
                    tasks[number, row] = tasks[read[through]]
                    continue
                inputs = tuple(tasks[given] for given in read)
                tasks[number, row] = made.task(number, signs[number], inputs, query, row)
        outputs.append({name: tasks[number, query] for name, number in graph.outputs.items()})
    return replace(plan, tasks=made.tasks, known=made.known, outputs=outputs)


def _rows(batch: BoundGraph, live: Sequence[int], query: int) -> dict[int, Sequence[int]]:
    """Rows of operators that a query needs, each operator after those that it reads."""
    nodes = batch.graph.nodes
    if all(node.kind not in CHOOSERS for node in nodes):
        return dict.fromkeys(live, (query,))
    needed: dict[int, dict[int, None]] = {number: {} for number in live}
    for number in {*batch.graph.outputs.values()}:
        needed[number][query] = None
    for number in reversed(live):
        for row in needed[number]:
            for given, its_row in read_rows(nodes[number], row, batch.counts, batch.size):
                needed[given][its_row] = None
    return {number: tuple(rows) for number, rows in needed.items()}


class _Expansion:
    """Maker of tasks, which finds those that are there already."""

    def __init__(self, batch: BoundGraph, merge: bool) -> None:
        self.tasks: list[OpTask] = []
        self.known: dict[int, Value] = {}
        self._batch, self._merge = batch, merge
        self._found: dict[Hashable, int] = {}
        self._signs: dict[Hashable, int] = {}

    def sign(self, node: Node) -> int:
        """Number that nodes of equal kind, type and attributes have in common."""
        key = (node.kind, node.type, _attrs_key(node.attrs))
        return self._signs.setdefault(key, len(self._signs))

    def task(self, number: int, sign: int, inputs: tuple[int, ...], query: int, row: int) -> int:
        """Find or make the task of a node's row, which a query needs."""
        node = self._batch.graph.nodes[number]
        key: Hashable
        if node.kind in SOURCES:
            value = self._batch.inputs[number][row]
            text = value if isinstance(value, str) else _attrs_key({"value": value})
            key = ("value", node.type, text) if self._merge else (number, row)
        elif self._merge and node.deterministic:
            key = (sign, inputs)
        else:
            key = (number, row, inputs)
        found = self._found.get(key)
        if found is not None:
            self.tasks[found].num_queries += 1
            return found
        made = self._found[key] = len(self.tasks)
        self.tasks.append(OpTask(number, inputs, query, row))
        if node.kind in SOURCES:
            self.known[made] = self._batch.inputs[number][row]
        return made

    def known_case(self, node: Node, key: int) -> int | None:
        """Number of the input that is a switch's value; None: its key is not known yet."""
        if key not in self.known:
            return None
        try:
            return chosen_case(node, self.known[key])
        except GraphError:
            return None  # it is raised when the task is run


def _reached(graph: Operators) -> set[int]:
    """Nodes that outputs need."""
    reached: set[int] = set()
    stack = list(graph.outputs.values())
    while stack:
        number = stack.pop()
        if number not in reached:
            reached.add(number)
            stack += graph.nodes[number].inputs
    return reached


def _passed(node: Node) -> int | None:
    """Number of the input that a node passes on unchanged; None: it changes it."""
    attrs = node.attrs
    if node.kind == "output" or (node.kind == "concat" and len(node.inputs) == 1):
        return 0
    if node.kind == "fmt" and len(attrs["pieces"]) == 1 and node.inputs:
        return 0
    if node.kind == "chat" and [role for role, _ in attrs["turns"]] == ["messages"]:
        return 0
    if node.kind == "slice" and attrs["start"] in (None, 0) and attrs["stop"] is None:
        return 0
    return None


def _attrs_key(attrs: Mapping[str, Any]) -> str:
    """Key that tells attributes apart, functions by identity: for one process."""
    return json.dumps(attrs, sort_keys=True, default=lambda function: f"function {id(function)}")

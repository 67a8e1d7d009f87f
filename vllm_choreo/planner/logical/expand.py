# SPDX-License-Identifier: Apache-2.0
"""Logical plan: the tasks to be computed, once each, from the operators of all queries.

Operators that no output needs are pruned, those that pass their input on are skipped; a switch
whose key is known keeps one case; identical subgraphs of deterministic operators are merged, within
a query and across queries; and values that the answer cache has are fetched. No rewriting changes
an output: sampled answers and impure functions are never merged.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.graph_json import function_name
from vllm_choreo.planner.logical.nodes import SOURCES, BoundGraph, Node, Operators
from vllm_choreo.planner.logical.values import attrs_key, chosen_case, evaluate


@dataclass(slots=True)
class OpTask:
    """An operator for the queries that share its value.

    Attributes:
        node: number of the operator in the graph.
        inputs: numbers of the tasks that it reads, all less than its own.
        query: number of the first query that needs it.
        num_queries: number of queries that need it.
    """

    node: int
    inputs: tuple[int, ...]
    query: int
    num_queries: int = 1


@dataclass
class LogicalPlan:
    """Tasks, each after those that it reads.

    Attributes:
        graph: the graph.
        batch_size: number of queries.
        tasks: operators for the queries that share their value.
        known: values of inputs, and those from a cache or a journal, by task.
        outputs: tasks of the results of each query, by name.
        num_instances: operators times queries, before anything was merged or pruned.
        num_fetched: tasks of models and functions whose values the cache had.
    """

    graph: Operators
    batch_size: int
    tasks: list[OpTask]
    known: dict[int, Any]
    outputs: list[dict[str, int]]
    num_instances: int
    num_fetched: int = 0
    _needed: set[int] | None = field(default=None, repr=False)

    def node(self, task: int) -> Node:
        """Operator of a task."""
        return self.graph.nodes[self.tasks[task].node]

    def needed(self) -> set[int]:
        """Tasks that outputs may need: all that are reached without going through known values."""
        if self._needed is None:
            stack = [task for outputs in self.outputs for task in outputs.values()]
            self._needed = set()
            while stack:
                task = stack.pop()
                if task not in self._needed:
                    self._needed.add(task)
                    if task not in self.known:
                        stack += self.tasks[task].inputs
        return self._needed

    def calls(self) -> list[int]:
        """Tasks that call the model, in their order."""
        found = [t for t in self.needed() if t not in self.known and self.node(t).kind == "llm"]
        return sorted(found)


# -- the rewriting ---------------------------------------------------------------------------------


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn Python's cyclic garbage collector off while a plan is made.

    A plan makes many objects, all of which stay, and each collection looks at all that there are.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collection()
def logical_plan(compiled: BoundGraph, *, prune: bool = True, merge: bool = True) -> LogicalPlan:
    """Make the tasks of a batch.

    Args:
        compiled: the graph and its inputs.
        prune: leave out operators that no output needs or that pass their input on.
        merge: make one task of identical deterministic operators.
    """
    graph = compiled.graph
    live = sorted(_reached(graph)) if prune else range(len(graph.nodes))
    plan = LogicalPlan(
        graph, compiled.batch_size, [], {}, [], len(graph.nodes) * compiled.batch_size
    )
    expand = _Expansion(plan, compiled, merge)
    signs = {number: expand.sign(graph.nodes[number]) for number in live}
    passed = {number: _passed(graph.nodes[number]) if prune else None for number in live}
    for query in range(compiled.batch_size):
        tasks: dict[int, int] = {}
        for number in live:
            node = graph.nodes[number]
            through = passed[number]
            if prune and node.kind == "switch":
                through = expand.known_case(node, tasks[node.inputs[0]])
            if through is not None:
                tasks[number] = tasks[node.inputs[through]]
                continue
            inputs = tuple(tasks[given] for given in node.inputs)
            tasks[number] = expand.task(number, signs[number], inputs, query)
        plan.outputs.append({name: tasks[number] for name, number in graph.outputs.items()})
    return plan


def fetch(
    plan: LogicalPlan,
    probe: Callable[[Node, Sequence[Any]], tuple[bool, Any]],
) -> None:
    """Add the values that a cache has to `plan.known`, from the inputs up.

    Args:
        probe: look-up of a deterministic `llm` or `fn` by the node and the values of its inputs;
            returns (found, its value).
    """
    for number, task in enumerate(plan.tasks):
        node = plan.graph.nodes[task.node]
        if number in plan.known or any(given not in plan.known for given in task.inputs):
            continue
        inputs = [plan.known[given] for given in task.inputs]
        if node.kind in ("llm", "fn"):
            if not node.deterministic:
                continue
            found, value = probe(node, inputs)
            if found:
                plan.known[number] = value
                plan.num_fetched += 1
            continue
        try:
            plan.known[number] = (
                inputs[chosen_case(node, inputs[0])]
                if node.kind == "switch"
                else evaluate(node, inputs)
            )
        except GraphError:
            continue  # it is raised when the task is run, for the queries that need it
    plan._needed = None


class _Expansion:
    """Maker of tasks, which finds those that are there already."""

    def __init__(self, plan: LogicalPlan, compiled: BoundGraph, merge: bool) -> None:
        self._plan = plan
        self._inputs: Mapping[int, Sequence[Any]] = compiled.inputs
        self._merge = merge
        self._found: dict[Any, int] = {}
        self._signs: dict[Any, int] = {}

    def sign(self, node: Node) -> int:
        """Number that nodes of equal kind, type and attributes have in common."""
        key = (node.kind, node.type, attrs_key(node.attrs))
        return self._signs.setdefault(key, len(self._signs))

    def task(self, number: int, sign: int, inputs: tuple[int, ...], query: int) -> int:
        """Find or make the task of a node in a query."""
        node = self._plan.graph.nodes[number]
        key: Any
        if node.kind in SOURCES:
            value = self._inputs[number][query]
            text = value if isinstance(value, str) else attrs_key({"value": value})
            key = ("value", node.type, text) if self._merge else (number, query)
        elif self._merge and node.deterministic:
            key = (sign, inputs)
        else:
            key = (number, query, inputs)
        found = self._found.get(key)
        if found is not None:
            self._plan.tasks[found].num_queries += 1
            return found
        made = self._found[key] = len(self._plan.tasks)
        self._plan.tasks.append(OpTask(number, inputs, query))
        if node.kind in SOURCES:
            self._plan.known[made] = self._inputs[number][query]
        return made

    def known_case(self, node: Node, key: int) -> int | None:
        """Number of the input that is a switch's value; None: its key is not known yet."""
        if key not in self._plan.known:
            return None
        try:
            return chosen_case(node, self._plan.known[key])
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
    if node.kind == "slice" and attrs["start"] in (None, 0) and attrs["stop"] is None:
        return 0
    return None


def call_dependencies(plan: LogicalPlan, calls: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Calls whose answers each call may read, directly or through other operators."""
    wanted = set(calls)
    above: dict[int, frozenset[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    nothing: frozenset[int] = frozenset()
    for number in sorted(plan.needed()):
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


def structure_keys(plan: LogicalPlan) -> list[bytes]:
    """Digest of each task's operator and inputs, whatever its number.

    Calls that are sorted by it have an order that does not depend on how the graph was written.
    """
    signs = [
        json.dumps([node.kind, node.attrs], sort_keys=True, default=function_name).encode()
        for node in plan.graph.nodes
    ]
    keys: list[bytes] = []
    for number, task in enumerate(plan.tasks):
        node = plan.graph.nodes[task.node]
        if node.kind in SOURCES:
            parts = [json.dumps(plan.known[number]).encode()]
        else:
            parts = [signs[task.node], *(keys[given] for given in task.inputs)]
        keys.append(hashlib.blake2b(b"|".join(parts), digest_size=12).digest())
    return keys

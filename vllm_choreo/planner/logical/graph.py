# SPDX-License-Identifier: Apache-2.0
"""Graphs of operators as data, unbound and bound to a batch of queries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from vllm_choreo.planner.errors import (
    BatchLengthError,
    GraphCycleError,
    GraphError,
    OperatorTypeError,
    UnknownPlaceholderError,
)
from vllm_choreo.planner.execute.run_stats import RunStats
from vllm_choreo.planner.explain import explain
from vllm_choreo.planner.logical.draw import mermaid
from vllm_choreo.planner.logical.graph_json import from_json, to_json
from vllm_choreo.planner.logical.nodes import SOURCES, Node, Value
from vllm_choreo.planner.logical.op import (
    DECLARED,
    Messages,
    Msg,
    Op,
    is_sequence,
    is_type,
    operator,
    type_of,
)
from vllm_choreo.planner.logical.rows import row_counts
from vllm_choreo.planner.plan import Plan, Target


@dataclass(frozen=True)
class Graph:
    """Operators, each after those that it reads.

    Attributes:
        nodes: all operators; if loaded or given, those that no output needs, too.
        outputs: numbers of the nodes that are results, by the name of the result, in their order.
    """

    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]

    @property
    def placeholders(self) -> dict[str, int]:
        """Numbers of the inputs, by name."""
        return {n.name: i for i, n in enumerate(self.nodes) if n.kind == "placeholder"}

    def compile(self, **inputs: Value) -> CompiledGraph:
        """Bind the placeholders to a batch: a list has one value for each query.

        Args:
            inputs: lists of one length; or a text, which is the same in all queries. Those
                that the program has declared, but no result reads, are accepted.

        Raises:
            UnknownPlaceholderError: the graph has no placeholder of a name.
            BatchLengthError: lists are of different lengths.
            OperatorTypeError: a value is neither a text nor a list of texts.
        """
        bound, size = _bound(self, inputs)
        given = {
            number: None if isinstance(values, Repeated) else len(values)
            for number, values in bound.items()
        }
        return CompiledGraph(self, bound, *_counted(self, given, size))

    def draw(self) -> str:
        """Return the graph as Mermaid text, which many viewers show as a picture."""
        return mermaid(self)

    def to_json(self) -> str:
        """Return the graph as JSON; functions by their names."""
        return to_json(self)

    @staticmethod
    def from_json(text: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> Graph:
        """Return the graph that `to_json` wrote; see `graph_json.from_json`."""
        return Graph(*from_json(text, functions or {}))


@dataclass(frozen=True)
class CompiledGraph:
    """A graph whose placeholders have values.

    Attributes:
        graph: the graph.
        inputs: values of each placeholder and each `data`, one per row, by number of the node.
        counts: rows of each node; None: it has the same value in every row.
        size: rows of the inputs that have a list.
        batch_size: number of queries, which is that of the results.
    """

    graph: Graph
    inputs: Mapping[int, Sequence[Value]] = field(repr=False)
    counts: Sequence[int | None] = field(repr=False)
    size: int
    batch_size: int

    def explain(
        self,
        target: Target | None = None,
        *,
        plan: Plan | None = None,
        stats: RunStats | None = None,
    ) -> str:
        """Return the plan as text; see `planner.explain.explain`."""
        return explain(self, target, plan=plan, stats=stats)

    def draw(self) -> str:
        """Return the graph as Mermaid text."""
        return self.graph.draw()


# -- building --------------------------------------------------------------------------------------


def build(results: Sequence[Messages] | Mapping[str, Messages]) -> Graph:
    """Build the graph of all operators that these results need.

    Args:
        results: operators, or histories; a mapping or `output` names its results, others have
            their operators' names.

    Raises:
        GraphError: no result, or two of one name; two placeholders of one name.
        GraphCycleError: an operator waits for itself.
    """
    is_list = isinstance(results, (Sequence, Mapping)) and not isinstance(results, str)
    if not is_list or not results:
        raise GraphError(
            "build takes a list of operators", parameter="results", value=repr(results)
        )
    named = list(results) if isinstance(results, Mapping) else []
    given = results.values() if isinstance(results, Mapping) else results
    wanted = [_as_operator(result) for result in given]
    order = _in_order(wanted)
    numbers: dict[Op, int] = {}
    nodes: list[Node] = []
    names = _Names(op.name for op in order)
    for op in order:
        same = names.taken.get(op.name)
        if same is not None and op.kind == same.kind == "placeholder" and op.type == same.type:
            numbers[op] = numbers[same]  # the same input, written twice
            continue
        name = names.name(op)
        numbers[op] = len(nodes)
        inputs = tuple(numbers[given] for given in op.inputs)
        nodes.append(Node(op.kind, op.type, inputs, op.attrs, name, op.line))
    outputs: dict[str, int] = {}
    for key, op in zip(named or [""] * len(wanted), wanted, strict=True):
        name = key or nodes[numbers[op]].name
        if name in outputs:
            raise GraphError("two results have this name", op=name, line=op.line)
        outputs[name] = numbers[op]
    return settled(Graph(tuple(nodes), outputs))


def _as_operator(result: object) -> Op:
    """Return a result, a history as the operator of one."""
    if is_sequence(result) and any(isinstance(part, Msg) for part in result):
        return operator("chat", result, "results")
    if isinstance(result, Op):
        return result
    advice = "a result is an operator, or a list of Msg in the list of results"
    raise OperatorTypeError(advice, parameter="results", value=repr(result))


def settled(graph: Graph) -> Graph:
    """Fix the order of texts whose order does not matter (`concat(order="any")`).

    Text of the graph itself comes first, then inputs, then other operators, as they stand in the
    graph.
    """
    nodes = []
    for node in graph.nodes:
        if node.attrs.get("loose"):
            sep, pieces = node.attrs["sep"], node.attrs["pieces"]
            parts = sorted(pieces[::2], key=lambda p: _late(graph, node, p))
            spread = [piece for part in parts for piece in (sep, part)][1:]
            kept = [piece for piece in spread if piece != ""]
            node = replace(node, attrs={"pieces": kept})
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs)


def _late(graph: Graph, node: Node, piece: str | int) -> tuple[int, int, str]:
    if isinstance(piece, str):
        return 0, 0, piece
    number = node.inputs[piece]
    return 1 + (graph.nodes[number].kind not in SOURCES), number, ""


def _in_order(wanted: Sequence[Op]) -> list[Op]:
    """Operators, each after those that it reads; no recursion, for chains may be long."""
    done: dict[Op, bool] = {}
    order: list[Op] = []
    stack: list[tuple[Op, bool]] = [(op, False) for op in reversed(wanted)]
    while stack:
        op, read = stack.pop()
        if read:
            done[op] = True
            order.append(op)
        elif op not in done:
            done[op] = False
            stack.append((op, True))
            for given in reversed(op.inputs):
                if done.get(given) is False:
                    raise GraphCycleError(
                        "it waits for itself: write repetition with loop",
                        op=given.name or given.kind,
                        line=given.line,
                    )
                stack.append((given, False))
    return order


class _Names:
    """Names of operators; `given` are those that the program has chosen."""

    def __init__(self, given: Iterable[str]) -> None:
        self.taken: dict[str, Op] = {}
        self._given = set(given)
        self._counts: Counter[str] = Counter()

    def name(self, op: Op) -> str:
        """Name an operator as no operator before. Raises GraphError: its own name is taken."""
        name = op.name
        if name in self.taken:
            other = self.taken[name].line
            raise GraphError(f"another operator has this name, at {other}", op=name, line=op.line)
        while not name or (not op.name and name in self._given):
            self._counts[op.kind] += 1
            name = f"{op.kind}_{self._counts[op.kind]}"
        self.taken[name] = op
        return name


# -- binding ---------------------------------------------------------------------------------------


def _bound(graph: Graph, inputs: Mapping[str, Value]) -> tuple[dict[int, Sequence[Value]], int]:
    placeholders = graph.placeholders
    for name in inputs:
        # One that no result reads is no mistake: pruning has dropped it.
        if name not in placeholders and name not in DECLARED:
            raise UnknownPlaceholderError(
                f"the graph has no such placeholder; it has {', '.join(placeholders) or 'none'}",
                parameter=name,
                value=inputs[name],
            )
    given: dict[int, Value] = {}
    for name, number in placeholders.items():
        node = graph.nodes[number]
        if name not in inputs:
            raise UnknownPlaceholderError(
                "compile gives it no value", op=name, line=node.line, parameter=name
            )
        given[number] = inputs[name]
    for number, node in enumerate(graph.nodes):
        if node.kind == "data":
            given[number] = node.attrs["values"] if "values" in node.attrs else node.attrs["value"]
    lists = {
        number: len(values)
        for number, values in given.items()
        if isinstance(values, list) and "value" not in graph.nodes[number].attrs
    }
    size = next(iter(lists.values()), 1)
    bound: dict[int, Sequence[Value]] = {}
    for number, values in given.items():
        node = graph.nodes[number]
        if number in lists and lists[number] != size:
            other = graph.nodes[next(iter(lists))].name
            raise BatchLengthError(
                f"{lists[number]} values, where {other} has {size}: one for each query is needed",
                op=node.name,
                line=node.line,
            )
        bound[number] = tuple(values) if number in lists else Repeated(values, size)
        for value in bound[number] if number in lists else [values]:
            _check_value(node, value)
    if not size:
        raise BatchLengthError("a batch has at least one query")
    return bound, size


def _counted(
    graph: Graph, given: Mapping[int, int | None], size: int
) -> tuple[Sequence[int | None], int, int]:
    counts, batch_size = row_counts(graph, given, size)
    return counts, size, batch_size


class Repeated(Sequence[Value]):
    """A value that every row has, in a batch of `size` rows."""

    def __init__(self, value: Value, size: int) -> None:
        self._value, self._size = value, size

    @overload
    def __getitem__(self, row: int) -> Value: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Value]: ...

    def __getitem__(self, row: int | slice) -> Value:
        if isinstance(row, slice):
            return [self._value for _ in range(self._size)[row]]
        return self._value  # also where results have more rows than inputs

    def __iter__(self) -> Iterator[Value]:
        return iter([self._value] * self._size)

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list


def _check_value(node: Node, value: Value) -> None:
    if not is_type(value, node.type):
        raise OperatorTypeError(
            f"{node.type} is needed, this is {type_of(value)}",
            op=node.name,
            line=node.line,
            value=value,
        )
    if node.type == "value":
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise OperatorTypeError(
                f"a value must be one that JSON has: {error}", op=node.name, line=node.line
            ) from error

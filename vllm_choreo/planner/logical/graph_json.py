# SPDX-License-Identifier: Apache-2.0
"""Graphs as JSON: functions are named; the loader says which function a name means."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping
from typing import Any

from vllm_choreo.planner.errors import GraphCycleError, GraphError, OperatorTypeError
from vllm_choreo.planner.logical.nodes import Node, Operators
from vllm_choreo.planner.logical.op import ROLES, TYPES

_FORMAT = 1
# The attributes of each kind, and how many inputs it has: (least, most).
_KINDS: dict[str, tuple[set[str], int, int | None]] = {
    "placeholder": (set(), 0, 0),
    "data": ({"value", "values"}, 0, 0),
    "fmt": ({"pieces"}, 0, None),
    "llm": ({"turns", "sampling"}, 0, None),
    "fn": ({"function", "pure"}, 0, None),
    "slice": ({"start", "stop"}, 1, 1),
    "item": ({"index"}, 1, 1),
    "concat": (set(), 1, None),
    "switch": ({"keys", "default"}, 2, None),
    "output": (set(), 1, 1),
}


def to_json(graph: Operators) -> str:
    """Write a graph as JSON. Raises GraphError: JSON cannot express an attribute."""
    operators = []
    for node in graph.nodes:
        attrs = dict(node.attrs)
        if node.kind == "fn":
            attrs["function"] = function_name(node.attrs["function"])
        operators.append(
            {
                "name": node.name,
                "kind": node.kind,
                "type": node.type,
                "inputs": [graph.nodes[given].name for given in node.inputs],
                "attrs": attrs,
                "line": node.line,
            }
        )
        try:
            json.dumps(attrs)
        except (TypeError, ValueError) as error:
            raise GraphError(
                f"JSON has no such value: {error}", op=node.name, line=node.line
            ) from error
    outputs = {name: graph.nodes[number].name for name, number in graph.outputs.items()}
    return json.dumps({"format": _FORMAT, "operators": operators, "outputs": outputs}, indent=1)


def function_name(function: Callable[..., Any]) -> str:
    """Name of a function in JSON: "module:qualified name"."""
    module = getattr(function, "__module__", "")
    return f"{module}:{getattr(function, '__qualname__', repr(function))}"


def from_json(
    text: str, functions: Mapping[str, Callable[..., Any]]
) -> tuple[tuple[Node, ...], dict[str, int]]:
    """Read the nodes and outputs of a graph that `to_json` wrote.

    Args:
        text: JSON; its operators may stand in any order.
        functions: functions by the names "module:name" or "name" that the text has for them.
            Nothing is ever imported because a file says so.

    Raises:
        GraphError: no such format, or an operator that is none.
        GraphCycleError: operators that wait for one another.
    """
    try:
        written = json.loads(text)
        found = {op["name"]: op for op in written["operators"]}
        outputs = dict(written["outputs"])
        known = written["format"] == _FORMAT and len(found) == len(written["operators"])
    except (ValueError, KeyError, TypeError) as error:
        raise GraphError(f"this is no graph in JSON: {error!r}", parameter="text") from error
    if not known:
        raise GraphError(f"a graph of format {_FORMAT} with distinct names is needed")
    numbers: dict[str, int] = {}
    nodes: list[Node] = []
    for name in _in_order(found):
        op = found[name]
        node = _node(op, tuple(numbers[given] for given in op["inputs"]), functions)
        _check_pieces(node, nodes)
        numbers[name] = len(nodes)
        nodes.append(node)
    for name, number in outputs.items():
        if number not in numbers:
            raise GraphError("a result that is no operator", parameter="outputs", value=name)
    return tuple(nodes), {name: numbers[op] for name, op in outputs.items()}


def _in_order(found: Mapping[str, Any]) -> list[str]:
    """Names of operators, each after those that it reads."""
    waiting = {}
    for name, op in found.items():
        inputs = op.get("inputs")
        line = str(op.get("line", ""))
        if not isinstance(inputs, list) or not all(given in found for given in inputs):
            raise GraphError(
                "it reads an operator that is not there",
                op=name,
                line=line,
                parameter="inputs",
                value=inputs,
            )
        waiting[name] = set(inputs)
    readers: dict[str, list[str]] = {name: [] for name in found}
    for name, inputs in waiting.items():
        for given in inputs:
            readers[given].append(name)
    names = list(found)
    place = {name: i for i, name in enumerate(names)}
    free = [place[name] for name, inputs in waiting.items() if not inputs]
    order: list[str] = []
    while free:  # as they stand in the file, as far as that is possible
        name = names[heapq.heappop(free)]
        order.append(name)
        for reader in readers[name]:
            waiting[reader].discard(name)
            if not waiting[reader]:
                heapq.heappush(free, place[reader])
    if len(order) < len(found):
        stuck = [name for name in found if waiting[name]]
        raise GraphCycleError(
            f"operators that wait for one another: {', '.join(stuck)}; write repetition with loop",
            op=stuck[0],
            line=str(found[stuck[0]].get("line", "")),
        )
    return order


def _node(
    op: Mapping[str, Any], inputs: tuple[int, ...], functions: Mapping[str, Callable[..., Any]]
) -> Node:
    name, kind, line = str(op["name"]), op.get("kind"), str(op.get("line", ""))
    if kind not in _KINDS or op.get("type") not in TYPES or not isinstance(op.get("attrs"), dict):
        raise OperatorTypeError("no operator of this language", op=name, line=line, value=kind)
    known, least, most = _KINDS[kind]
    attrs = dict(op["attrs"])
    wrong = set(attrs) - known or (known - set(attrs) if kind != "data" else not attrs)
    if wrong or len(inputs) < least or (most is not None and len(inputs) > most):
        raise OperatorTypeError(
            f"{kind} has the attributes {sorted(known)} and at least {least} inputs",
            op=name,
            line=line,
            parameter="attrs",
            value=attrs,
        )
    if kind == "fn":
        called = attrs["function"]
        function = functions.get(called) or functions.get(str(called).rpartition(":")[2])
        if function is None:
            raise GraphError(
                "say in `functions` which function this name means",
                op=name,
                line=line,
                parameter="functions",
                value=called,
            )
        attrs["function"] = function
    return Node(kind, op["type"], inputs, attrs, name, line)


def _check_pieces(node: Node, before: list[Node]) -> None:
    """Check that each piece is text or the number of a text input, else OperatorTypeError."""
    if node.kind not in ("fmt", "llm"):
        return
    turns = node.attrs["turns"] if node.kind == "llm" else [["text", node.attrs["pieces"]]]
    roles = (*ROLES, "opening", "text")
    for role, pieces in turns:
        for piece in pieces:
            is_input = type(piece) is int and 0 <= piece < len(node.inputs)
            fits = is_input and before[node.inputs[piece]].type == "text"
            if role not in roles or not (isinstance(piece, str) or fits):
                raise OperatorTypeError(
                    "a piece is text, or the number of an input that is text",
                    op=node.name,
                    line=node.line,
                    parameter="pieces",
                    value=piece,
                )

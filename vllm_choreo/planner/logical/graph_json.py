# SPDX-License-Identifier: Apache-2.0
"""Graphs as JSON: functions are named; the loader says which function a name means."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, defstruct

from vllm_choreo.convert import convert
from vllm_choreo.planner.errors import GraphCycleError, GraphError, OperatorTypeError
from vllm_choreo.planner.logical.nodes import Node, Operators
from vllm_choreo.planner.logical.op import ROLES, TYPES
from vllm_choreo.planner.logical.topology import in_order

_FORMAT = 1
_NO_GRAPH = "this is no graph in JSON"
_WRONG_FORMAT = f"a graph of format {_FORMAT} with distinct names is needed"
_NO_INPUT = "it reads an operator that is not there"
_NO_OPERATOR = "no operator of this language"


def _attrs(fields: Mapping[str, object], *default: object) -> type[Struct]:
    """Make the form of an operator's attributes, of types by name."""
    forms: list[Any] = [(name, form, *default) for name, form in fields.items()]
    return defstruct("attrs", forms, forbid_unknown_fields=True)


# The attributes of each kind, and how many inputs it has: (least, most).
_KINDS: dict[str, tuple[type[Struct], int, int | None]] = {
    "placeholder": (_attrs({}), 0, 0),
    "data": (_attrs({"value": Any, "values": list[Any]}, UNSET), 0, 0),
    "fmt": (_attrs({"pieces": list[Any]}), 0, None),
    "chat": (_attrs({"turns": list[tuple[str, list[Any]]]}), 0, None),
    "llm": (_attrs({"turns": list[tuple[str, list[Any]]], "sampling": dict[str, Any]}), 0, None),
    "fn": (_attrs({"function": str, "pure": bool}), 0, None),
    "slice": (_attrs({"start": int | None, "stop": int | None}), 1, 1),
    "item": (_attrs({"index": int}), 1, 1),
    "concat": (_attrs({}), 1, None),
    "switch": (_attrs({"keys": list[Any], "default": bool}), 2, None),
    "batch_slice": (_attrs({"start": int | None, "stop": int | None}), 1, 1),
    "batch_concat": (_attrs({}), 1, None),
    "output": (_attrs({}), 1, 1),
}


class _Operator(Struct):
    """An operator as it is written, which reads others by their names."""

    name: Annotated[str, Meta(description=_NO_GRAPH)]
    kind: str
    type: str
    inputs: Annotated[list[str], Meta(description=_NO_INPUT)]
    attrs: dict[str, Any]
    line: str = ""

    advice: ClassVar[str] = _NO_OPERATOR

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.type not in TYPES:
            raise OperatorTypeError(_NO_OPERATOR, op=self.name, line=self.line, value=self.kind)
        form, least, most = _KINDS[self.kind]
        count = len(self.inputs)
        if not (_fits(self.attrs, form) and least <= count <= (count if most is None else most)):
            raise OperatorTypeError(
                f"{self.kind} has the attributes {sorted(form.__struct_fields__)} and at least "
                f"{least} inputs",
                op=self.name,
                line=self.line,
                parameter="attrs",
                value=self.attrs,
            )


def _fits(attrs: Mapping[str, Any], form: type[Struct]) -> bool:
    try:
        msgspec.convert(attrs, form)
    except msgspec.ValidationError:
        return False
    return bool(attrs) or not form.__struct_fields__  # `data` has either of two


class _Written(Struct):
    """A graph as it is written."""

    format: Annotated[Literal[1], Meta(description=_WRONG_FORMAT)]
    operators: list[_Operator]
    outputs: dict[str, str]

    advice: ClassVar[str] = _NO_GRAPH


def to_json(graph: Operators) -> str:
    """Write a graph as JSON. Raises GraphError: JSON cannot express an attribute."""
    operators = []
    for node in graph.nodes:
        inputs = [graph.nodes[given].name for given in node.inputs]
        attrs = node.attrs
        if node.kind == "fn":
            attrs = {**attrs, "function": function_name(attrs["function"])}
        operators.append(
            {
                "name": node.name,
                "kind": node.kind,
                "type": node.type,
                "inputs": inputs,
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
        given = json.loads(text)
    except ValueError as error:
        raise GraphError(f"{_NO_GRAPH}: {error!r}", parameter="text") from error
    form = Annotated[_Written, Meta(description=_NO_GRAPH)]
    written: _Written = convert(given, form, "text", GraphError)
    found = {op.name: op for op in written.operators}
    if len(found) < len(written.operators):
        raise GraphError(_WRONG_FORMAT)
    numbers: dict[str, int] = {}
    nodes: list[Node] = []
    for op in _in_order(found):
        inputs = tuple(numbers[name] for name in op.inputs)
        node = Node(op.kind, op.type, inputs, _callable(op, functions), op.name, op.line)
        _check_pieces(node, nodes)
        numbers[op.name] = len(nodes)
        nodes.append(node)
    for result, name in written.outputs.items():
        if name not in numbers:
            raise GraphError("a result that is no operator", parameter="outputs", value=result)
    return tuple(nodes), {result: numbers[name] for result, name in written.outputs.items()}


def _in_order(found: Mapping[str, _Operator]) -> list[_Operator]:
    """Operators, each after those that it reads, else as they stand in the file."""
    for op in found.values():
        if any(name not in found for name in op.inputs):
            raise GraphError(
                _NO_INPUT, op=op.name, line=op.line, parameter="inputs", value=op.inputs
            )
    places = {name: (place,) for place, name in enumerate(found)}
    order = in_order({op.name: op.inputs for op in found.values()}, places.__getitem__)
    if len(order) < len(found):
        ordered = set(order)
        stuck = [op for op in found.values() if op.name not in ordered]
        raise GraphCycleError(
            f"operators that wait for one another: {', '.join(op.name for op in stuck)}; write "
            "repetition with loop",
            op=stuck[0].name,
            line=stuck[0].line,
        )
    return [found[name] for name in order]


def _callable(op: _Operator, functions: Mapping[str, Callable[..., Any]]) -> Mapping[str, Any]:
    """Attributes of an operator, with the function that a name means."""
    if op.kind != "fn":
        return op.attrs
    name = op.attrs["function"]
    function = functions.get(name) or functions.get(name.rpartition(":")[2])
    if function is None:
        raise GraphError(
            "say in `functions` which function this name means",
            op=op.name,
            line=op.line,
            parameter="functions",
            value=name,
        )
    return {**op.attrs, "function": function}


def _check_pieces(node: Node, before: Sequence[Node]) -> None:
    """Check that each piece is text or the number of an input that fits, else OperatorTypeError."""
    if node.kind not in ("fmt", "llm", "chat"):
        return
    turns = [["text", node.attrs["pieces"]]] if node.kind == "fmt" else node.attrs["turns"]
    roles = (*ROLES, "messages") if node.kind == "chat" else (*ROLES, "messages", "opening", "text")
    for role, pieces in turns:
        for piece in pieces or [None] * (role == "messages"):
            is_input = type(piece) is int and 0 <= piece < len(node.inputs)
            needed = "messages" if role == "messages" else "text"
            fits = is_input and before[node.inputs[piece]].type == needed
            is_text = isinstance(piece, str) and role != "messages"
            if role not in roles or not (is_text or fits):
                raise OperatorTypeError(
                    "a piece is text, or the number of an input that is text or, of messages, "
                    "a history",
                    op=node.name,
                    line=node.line,
                    parameter="pieces",
                    value=piece,
                )

# SPDX-License-Identifier: Apache-2.0
"""`Op`: a lazy operator, and what its makers share: types, pieces of text, lines, refusals."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_choreo.planner.graph_errors import OperatorTypeError

TYPES = ("text", "list", "value")
ROLES = ("system", "user", "assistant", "tool")
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True, eq=False)
class Op:
    """A lazy operator; it stands for its value in every query. Compared by identity.

    Attributes:
        kind: "placeholder", "data", "fmt", "llm", "fn", "slice", "item", "concat", "switch" or
            "output".
        type: of its value: "text", "list" (of texts) or "value".
        inputs: the operators that it reads.
        attrs: what else it is made of; only data that JSON has, and functions.
        name: as given; "": it is named when the graph is built.
        line: "file:number" where it was written.
    """

    kind: str
    type: str
    inputs: tuple[Op, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    line: str = ""

    def __repr__(self) -> str:
        return f"<{self.name or self.kind}: {self.type}, {self.line}>"

    def __iter__(self) -> Any:
        raise refused(self, "an operator has no value before invoke: use slice, item or fn")

    def __bool__(self) -> bool:
        raise refused(self, "an operator has no value before invoke: use switch")

    def __str__(self) -> str:
        raise refused(self, "an operator is no text before invoke: put it into fmt or concat")

    def __format__(self, spec: str) -> str:
        return str(self)


Text = str | Op


@dataclass(frozen=True)
class Msg:
    """A chat message of a prompt: who speaks, and what, a text or an operator."""

    role: str
    content: Text


def text_of(made: Op, pieces: Sequence[Text], more: Mapping[str, Any] | None = None) -> Op:
    """The operator `made`, as a text of these pieces."""
    inputs: list[Op] = []
    written = pieces_of(made, pieces, inputs, keep_empty=bool(more))
    attrs = {"pieces": written, **(more or {})}
    return Op("fmt", "text", tuple(inputs), attrs, made.name, made.line)


def pieces_of(
    made: Op, pieces: Sequence[Text], inputs: list[Op], keep_empty: bool = False
) -> list[str | int]:
    """The pieces of a text: strings, and numbers of `inputs`, to which operators are added."""
    written: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, Op):
            if piece.type != "text":
                raise refused(made, f"a {piece.type} is no text: use item or fn", "input", piece)
            if piece not in inputs:
                inputs.append(piece)
            written.append(inputs.index(piece))
        elif isinstance(piece, str):
            if piece or keep_empty:
                written.append(piece)
        else:
            raise refused(made, "a text or an operator is needed", "input", piece)
    return written


def type_of(value: Any) -> str:
    """The type of a value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "list"
    return "value"


def operator(kind: str, given: Any, parameter: str, name: Any = "") -> Op:
    """What an operator of this kind is given, which is an operator itself.

    Raises:
        OperatorTypeError: it is a text, a list of operators, or something else.
    """
    if isinstance(given, Op):
        return given
    raise refused(
        Op(kind, "value", (), {}, name, line_of_caller()),
        f"one operator is needed, this is a {type(given).__name__}: put several into concat or fn, "
        "and a text or a value into data",
        parameter,
        repr(given),
    )


def typed(op: Op) -> Op:
    """The operator. Raises OperatorTypeError: its type is none."""
    if op.type not in TYPES:
        raise refused(op, f"the types are {', '.join(TYPES)}", "type", op.type)
    return op


def refused(op: Op, message: str, parameter: str = "", value: Any = None) -> OperatorTypeError:
    """What is raised of an operator, or of its arguments."""
    shown = repr(value) if isinstance(value, Op) else value
    named = op.name if isinstance(op.name, str) and op.name else op.kind
    return OperatorTypeError(message, op=named, line=op.line, parameter=parameter, value=shown)


def line_of_caller() -> str:
    """Where the program that uses the language wrote this operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""

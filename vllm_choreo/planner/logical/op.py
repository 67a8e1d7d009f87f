# SPDX-License-Identifier: Apache-2.0
"""Lazy operators (`Op`), and helpers of their makers: types, pieces, lines, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Never

from vllm_choreo.planner.errors import OperatorTypeError

TYPES = ("text", "list", "value")
ROLES = ("system", "user", "assistant", "tool")
_HERE = str(Path(__file__).parents[1])


@dataclass(frozen=True, eq=False)
class Op:
    """A lazy operator, which stands for its value in every query and is compared by identity.

    Attributes:
        kind: "placeholder", "data", "fmt", "llm", "fn", "slice", "item", "concat", "switch" or
            "output".
        type: "text", "list" (of texts) or "value", as its value is.
        inputs: the operators that it reads.
        attrs: all else that defines it; only data that JSON can express, and functions.
        name: given name; "": it is named when the graph is built.
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

    def __iter__(self) -> Iterator[Never]:
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
    """A chat message of a prompt: its role, and its content, a text or an operator."""

    role: str
    content: Text


def text_of(made: Op, pieces: Sequence[Text], more: Mapping[str, Any] | None = None) -> Op:
    """Return the `fmt` operator of these pieces, with the name and the line of `made`."""
    inputs: list[Op] = []
    written = pieces_of(made, pieces, inputs, keep_empty=bool(more))
    attrs = {"pieces": written, **(more or {})}
    return Op("fmt", "text", tuple(inputs), attrs, made.name, made.line)


def pieces_of(
    made: Op, pieces: Sequence[Text], inputs: list[Op], keep_empty: bool = False
) -> list[str | int]:
    """Return a text's pieces: strings and numbers of `inputs`, to which operators are added."""
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


def type_of(value: object) -> str:
    """Type of a value: "text", "list" or "value"."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "list"
    return "value"


def operator(kind: str, given: object, parameter: str, name: str = "") -> Op:
    """Return `given`, the input of an operator of this kind, if it is an operator itself.

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
    """Return the operator. Raises OperatorTypeError: there is no such type."""
    if op.type not in TYPES:
        raise refused(op, f"the types are {', '.join(TYPES)}", "type", op.type)
    return op


def refused(op: Op, message: str, parameter: str = "", value: object = None) -> OperatorTypeError:
    """Error that refuses an operator or one of its arguments."""
    shown = repr(value) if isinstance(value, Op) else value
    named = op.name if isinstance(op.name, str) and op.name else op.kind
    return OperatorTypeError(message, op=named, line=op.line, parameter=parameter, value=shown)


def line_of_caller() -> str:
    """Find the "file:number" where the calling program wrote this operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""

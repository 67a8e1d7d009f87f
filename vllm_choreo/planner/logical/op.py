# SPDX-License-Identifier: Apache-2.0
"""Lazy operators (`Op`), and helpers of their makers: types, pieces, lines, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Never, TypeGuard

from vllm_choreo.planner.errors import OperatorTypeError

TYPES = ("text", "list", "messages", "value")
ROLES = ("system", "user", "assistant", "tool")
DECLARED: set[str] = set()  # names of all placeholders of this program
_HERE = str(Path(__file__).parents[1])


@dataclass(frozen=True, eq=False)
class Op:
    """A lazy operator, which stands for its value in every query and is compared by identity.

    Attributes:
        kind: "placeholder", "data", "fmt", "chat", "llm", "fn", "slice", "item", "concat",
            "switch", "batch_slice", "batch_concat" or "output".
        type: "text", "list" (of texts), "messages" (of a chat) or "value", as its value is.
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
        advice = "use slice, item or fn"
        if self.type == "messages":
            advice = "put it into the list as it is, [history, Msg(...)]"
        raise refused(self, f"an operator has no value before invoke: {advice}")

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


Messages = Op | Sequence[Msg | Op]  # a history: an operator, or messages and operators of histories


def text_of(made: Op, pieces: Sequence[object], more: Mapping[str, Any] | None = None) -> Op:
    """Return the `fmt` operator of these pieces, with the name and the line of `made`."""
    inputs: list[Op] = []
    written = pieces_of(made, pieces, inputs, keep_empty=bool(more))
    attrs = {"pieces": written, **(more or {})}
    return Op("fmt", "text", tuple(inputs), attrs, made.name, made.line)


def pieces_of(
    made: Op, pieces: Sequence[object], inputs: list[Op], keep_empty: bool = False
) -> list[str | int]:
    """Return a text's pieces: strings and numbers of `inputs`, to which operators are added."""
    written: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, Op):
            if piece.type != "text":
                raise refused(made, f"{piece.type} is no text: use item or fn", "input", piece)
            if piece not in inputs:
                inputs.append(piece)
            written.append(inputs.index(piece))
        elif isinstance(piece, str):
            if piece or keep_empty:
                written.append(piece)
        else:
            raise refused(made, "a text or an operator is needed", "input", piece)
    return written


def turns_of(made: Op, messages: object, inputs: list[Op]) -> list[list[Any]]:
    """Return the turns of a prompt or a history; operators are added to `inputs`.

    A turn is [role, pieces], or ["messages", [number of a history among the inputs]]. Of a history
    that is written out (`chat`), the turns themselves are taken.

    Raises:
        OperatorTypeError: no messages, or something else among them.
    """
    given = [messages] if isinstance(messages, Op) and messages.type == "messages" else messages
    if not is_sequence(given) or not given:
        advice = "a list of Msg is needed, or an operator of messages"
        raise refused(made, advice, "messages", repr(messages))
    turns: list[list[Any]] = []
    for message in given:
        if isinstance(message, Op) and message.kind == "chat":
            turns += [
                [role, [p if isinstance(p, str) else message.inputs[p] for p in pieces]]
                for role, pieces in message.attrs["turns"]
            ]
        elif isinstance(message, Op) and message.type == "messages":
            turns.append(["messages", [message]])
        elif isinstance(message, Msg) and message.role in ROLES:
            turns.append([message.role, [message.content]])
        else:
            raise refused(made, f"each is a Msg by one of {ROLES}", "messages", repr(message))
    for turn in turns:
        role, pieces = turn
        is_history = role == "messages"
        turn[1] = [_numbered(pieces[0], inputs)] if is_history else pieces_of(made, pieces, inputs)
    return turns


def _numbered(op: Op, inputs: list[Op]) -> int:
    """Return the number of an operator among the inputs, to which it is added if need be."""
    if op not in inputs:
        inputs.append(op)
    return inputs.index(op)


def chat_of(made: Op, messages: object) -> Op:
    """Return the operator of a history, with the name and the line of `made`."""
    inputs: list[Op] = []
    turns = turns_of(made, messages, inputs)
    return Op("chat", "messages", tuple(inputs), {"turns": turns}, made.name, made.line)


def is_sequence(given: object) -> TypeGuard[Sequence[object]]:
    """Return whether this is a list or a tuple, or the like, of objects of their own."""
    return isinstance(given, Sequence) and not isinstance(given, str)


def type_of(value: object) -> str:
    """Type of a value: "text", "list", "messages" or "value"."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "list"
    return "messages" if value and is_type(value, "messages") else "value"


def is_type(value: object, type: str) -> bool:
    """Return whether a value is of a type: all are a "value", if JSON can express them."""
    if type == "messages":
        return isinstance(value, list) and all(map(_is_message, value))
    return type in ("value", type_of(value))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        return False
    return value["role"] in ROLES and isinstance(value["content"], str)


def operator(kind: str, given: object, parameter: str, name: str = "") -> Op:
    """Return `given`, the input of an operator of this kind, as an operator.

    Messages become the operator of a history.

    Raises:
        OperatorTypeError: it is a text, a list of operators, or something else.
    """
    if isinstance(given, Op):
        return given
    made = Op(kind, "value", (), {}, name, line_of_caller())
    if is_sequence(given) and any(isinstance(part, Msg) for part in given):
        return chat_of(replace(made, name=""), given)
    raise refused(
        made,
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

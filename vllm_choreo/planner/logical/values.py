# SPDX-License-Identifier: Apache-2.0
"""Values of operators that no model computes, and the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol

from vllm_choreo.chat.template import TurnTemplate
from vllm_choreo.planner.errors import (
    GraphError,
    ImpureFunctionError,
    OperatorFailedError,
    OperatorTypeError,
)
from vllm_choreo.planner.logical.nodes import Node, Value
from vllm_choreo.planner.logical.op import is_type


class PromptTurns(Protocol):
    """Texts around the messages of a chat: a `Template`, or a model's own (`chat.ChatTurns`)."""

    @property
    def start(self) -> str: ...  # begins every conversation

    def around(self, role: str) -> tuple[str, str]: ...

    def assistant(self, opening: str = "") -> str: ...

    def ends_turn(self, text: str) -> bool: ...

    def to_json(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Template(TurnTemplate):
    """Text around chat messages, alike for all roles.

    Exact plans take for granted that the text up to a `closing` has the same tokens apart as
    together with the `opening` that follows.
    """

    start: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check that messages end, and that their opening has no hole but `{role}`.

        Raises:
            GraphError: `closing` is empty, or `opening` has another hole.
        """
        if not self.closing:
            raise GraphError(
                "a message needs an end, such as a line break: prompts are cut there; for text "
                "without a chat, use ops.complete",
                parameter="template.closing",
                value=self.closing,
            )
        try:
            self.begin("user")
        except (KeyError, IndexError, ValueError) as error:
            raise GraphError(
                f"the opening of a message has no hole but {{role}}: {error!r}",
                parameter="template.opening",
                value=self.opening,
            ) from None

    def around(self, role: str) -> tuple[str, str]:
        """Texts before and behind a message of a role."""
        return self.begin(role), self.closing

    def assistant(self, opening: str = "") -> str:
        """The beginning of an answer, for the model to go on from."""
        return self.begin("assistant") + opening

    def ends_turn(self, text: str) -> bool:
        """Tell if a text ends with what closes a message."""
        return text.endswith(self.closing)

    def to_json(self) -> dict[str, str]:
        """The texts by their names, as plain data."""
        return asdict(self)


CHATML = Template()


def prompt_pieces(node: Node, turns: PromptTurns) -> list[str | int]:
    """Pieces of an `llm` operator's prompt: text and numbers of inputs, the opening at the end."""
    pieces: list[str | int] = [turns.start] if turns.start else []
    opening = ""
    for role, parts in node.attrs["turns"]:
        if role == "text":  # without a chat
            return list(parts)
        if role == "opening":
            opening = parts[0]
        elif role == "messages":
            pieces += parts
        else:
            before, behind = turns.around(role)
            pieces += [before, *parts, behind]
    return [*pieces, turns.assistant(opening)]


def prompt_text(node: Node, inputs: Sequence[Value], turns: PromptTurns) -> str:
    """Prompt of an `llm` operator as text."""
    pieces = prompt_pieces(node, turns)
    return "".join(
        piece if isinstance(piece, str) else as_text(inputs[piece], turns) for piece in pieces
    )


def as_text(value: Value, turns: PromptTurns) -> str:
    """Text of a value in a prompt: a text itself, messages with their openings and closings."""
    if not isinstance(value, list):
        return str(value)
    return "".join(message["content"].join(turns.around(message["role"])) for message in value)


def evaluate(node: Node, inputs: Sequence[Value]) -> Value:
    """Compute the value of a `fmt`, `chat`, `slice`, `item`, `concat`, `switch` or `output`.

    Raises:
        OperatorFailedError: a list has no such item, or a switch no such case.
    """
    attrs = node.attrs
    if node.kind == "fmt":
        pieces = attrs["pieces"]
        return "".join(piece if isinstance(piece, str) else inputs[piece] for piece in pieces)
    if node.kind == "chat":
        return _history(node, inputs)
    if node.kind == "slice":
        return inputs[0][attrs["start"] : attrs["stop"]]
    if node.kind == "item":
        try:
            found = inputs[0][attrs["index"]]
            return found if isinstance(found, str) else found["content"]
        except IndexError as error:
            raise failed(
                node, f"a list of {len(inputs[0])} has no item {attrs['index']}"
            ) from error
    if node.kind == "concat":
        return [part for given in inputs for part in given]
    if node.kind == "switch":
        return inputs[chosen_case(node, inputs[0])]
    assert node.kind == "output", node.kind
    return inputs[0]


def _history(node: Node, inputs: Sequence[Value]) -> list[dict[str, str]]:
    """Messages of a `chat`."""
    messages: list[dict[str, str]] = []
    for role, pieces in node.attrs["turns"]:
        if role == "messages":
            messages += inputs[pieces[0]]
        else:
            texts = (piece if isinstance(piece, str) else inputs[piece] for piece in pieces)
            messages.append({"role": role, "content": "".join(texts)})
    return messages


def chosen_case(node: Node, key: Value) -> int:
    """Number of the input that is the value of a `switch`.

    Raises:
        OperatorFailedError: no case has this key, and there is no default.
    """
    keys = node.attrs["keys"]
    if key in keys:
        return 1 + int(keys.index(key))
    if not node.attrs["default"]:
        raise failed(node, f"no case has the key {key!r}, and there is no default")
    return 1 + len(keys)


class Functions:
    """Caller of a graph's functions; it makes the first call of each pure one twice."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def call(self, node: Node, inputs: Sequence[Value]) -> Value:
        """Call the function of a `fn`.

        Raises:
            OperatorFailedError: the function raised; its error is `__cause__`.
            ImpureFunctionError: the function is declared pure, and it is not.
            OperatorTypeError: its value is of another type than declared.
        """
        function = node.attrs["function"]
        try:
            value = function(*inputs)
            if node.attrs["pure"] and id(function) not in self._seen:
                self._seen.add(id(function))
                if function(*inputs) != value:
                    raise ImpureFunctionError(
                        "declared pure, and the same inputs gave two values: write pure=False",
                        op=node.name,
                        line=node.line,
                        parameter="pure",
                        value=True,
                    )
        except GraphError:
            raise
        except Exception as error:
            raise failed(node, f"the function raised {type(error).__name__}: {error}") from error
        return _checked(node, value)


def failed(node: Node, message: str) -> OperatorFailedError:
    """Error of an operator."""
    return OperatorFailedError(message, op=node.name, line=node.line)


def _checked(node: Node, value: Value) -> Value:
    """Return the value, a tuple as a list. Raises OperatorTypeError: not of the declared type."""
    value = list(value) if isinstance(value, tuple) else value
    if not is_type(value, node.type):
        raise OperatorTypeError(
            f"the function is declared to return {node.type}",
            op=node.name,
            line=node.line,
            parameter="returns",
            value=value,
        )
    if node.type == "value":
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise OperatorTypeError(
                f"a function returns what JSON has: {error}", op=node.name, line=node.line
            ) from error
    return value

# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts as trees, whichever way they were written.

    Schema   Text | Module | Union | Turn | Scaffold       Prompt   Text | Use | Turn | Passed
      Module   Text | Module | Union | Turn | Param                   | Prompt (of another schema)
      Union    Module                                        Use      Text | Use | Passed
      Turn     as what it stands in, without turns           Turn     Text | Passed

Trees are immutable and compared by what they say, not by where it was written. Neighbouring texts
are one text, and there are no empty ones. `check_schema` and `check_prompt` hold the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.errors import PmlError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Place:
    """Place where something was written; lines and columns count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class MarkupNode:
    """A part of a tree, and where it was written; None: in a program."""

    place: Place | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Text(MarkupNode):
    """Text as the model gets it, white space included."""

    text: str


@dataclass(frozen=True)
class Param(MarkupNode):
    """A place for an argument.

    Attributes:
        name: name of the argument, in prompts an attribute of the module's element.
        length: the most tokens that an argument has.
        scaffold: the text that stands there if no argument is given, before unknown tokens.
    """

    name: str
    length: int
    scaffold: str = ""


@dataclass(frozen=True)
class Scaffold(MarkupNode):
    """Modules that are also encoded together, and read so when all of them are chosen.

    Attributes:
        modules: their paths, such as "overseas/tokyo".
    """

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Container(MarkupNode):
    """A node with others in it."""

    children: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", merge_texts(self.children))


@dataclass(frozen=True)
class Module(Container):
    """A part that prompts may take.

    Attributes:
        name: unique among the modules beside it.
        cache: whether it is encoded once, or with each prompt.
    """

    name: str = ""
    cache: bool = True


@dataclass(frozen=True)
class Union(Container):
    """Modules of which a prompt takes one at most; they begin at the same position.

    Attributes:
        scaffold: name of the member that stands in for the union where modules behind it are
            encoded with what stands before them; "": none does.
    """

    scaffold: str = ""


@dataclass(frozen=True)
class Turn(Container):
    """A turn of a chat, in the words of the model's own template; `role` is one of `ROLES`."""

    role: str = ""


@dataclass(frozen=True)
class Schema(Container):
    """Text that all prompts have, and modules that they choose from."""

    name: str = ""


@dataclass(frozen=True)
class Use(Container):
    """A module that a prompt takes; `arguments` are `(parameter, text)`, in the order of names."""

    name: str = ""
    arguments: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "arguments", tuple(sorted(self.arguments)))


@dataclass(frozen=True)
class Passed(MarkupNode):
    """A message made at run time: whoever runs the prompt passes it under this name."""

    name: str


@dataclass(frozen=True)
class Prompt(Container):
    """A choice of a schema's modules, and new text; `schema` is the schema's name."""

    schema: str = ""


Document = Schema | Prompt


def merge_texts(children: Sequence[Any]) -> tuple[Any, ...]:
    """Join neighbouring texts of children, and leave empty ones out."""
    made: list[Any] = []
    for child in children:
        if isinstance(child, Text):
            if not child.text:
                continue
            if made and isinstance(made[-1], Text):
                last = made.pop()
                child = Text(last.text + child.text, place=last.place)
        made.append(child)
    return tuple(made)


def wrong(
    message: str, node: MarkupNode | Place | None, parameter: str, value: object = None
) -> PmlError:
    """Make an error that says where `node` was written, if it was."""
    place = node if isinstance(node, Place) else getattr(node, "place", None)
    where = f"line {place.line}, column {place.column}: " if place else ""
    return PmlError(where + message, parameter=parameter, value=value)

# SPDX-License-Identifier: Apache-2.0
"""Positions of a schema's tokens: trees and a tokenizer in, positions out. No torch, no vllm.

    schema   text | module a          | text | union            | text
                    text  param  text          b | c (longer)
    position 0      5     9      14     20     24                 31

A *segment* is what is encoded as one message: tokens of one module, or of the text that all prompts
have, that nothing of another one cuts. The members of a union begin where the union begins; what
follows it begins after the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

from vllm_choreo.chat.template import TemplatedTokenizer
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.tree import (
    Container,
    MarkupNode,
    Module,
    Param,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    wrong,
)

MAX_SEGMENTS = 1_000


@dataclass(frozen=True)
class LaidParam:
    """A parameter: tokens `start … start + length - 1` of its segment stand in for an argument."""

    name: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Segment:
    """Tokens that are encoded as one message.

    Attributes:
        path: path of the module; () for the text that all prompts have.
        index: its index among the module's segments.
        position: position of the first token.
        token_ids: tokens, placeholders included.
        params: parameters in their order.
    """

    path: tuple[str, ...]
    index: int
    position: int
    token_ids: tuple[int, ...]
    params: tuple[LaidParam, ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True)
class LaidModule:
    """A module, or the schema itself, with positions.

    Attributes:
        node: its node in the tree.
        path: the names from the schema's module down to it.
        start, stop: the positions that it takes, those of its modules included.
        items: segments, modules and unions, in their order.
        turns: turns of the chat that it brings, each as `(role, before, after)`, behind the index
            of the item in which, or before which, it begins.
    """

    node: Module | Schema
    path: tuple[str, ...]
    start: int
    stop: int
    items: tuple[LaidItem, ...]
    turns: tuple[tuple[int, tuple[str, str, str]], ...]

    @property
    def title(self) -> str:
        return "/".join(self.path)

    @property
    def is_cached(self) -> bool:
        """True if it is encoded once, False with each prompt."""
        return not isinstance(self.node, Module) or self.node.cache

    @property
    def segments(self) -> list[Segment]:
        """Segments of its own."""
        return [item for item in self.items if isinstance(item, Segment)]

    @cached_property
    def modules(self) -> dict[str, LaidModule]:
        """Modules right inside it, by name."""
        found = {}
        for item in self.items:
            for module in item.members if isinstance(item, LaidUnion) else [item]:
                if isinstance(module, LaidModule):
                    found[module.node.name] = module
        return found

    @property
    def params(self) -> dict[str, int]:
        """Lengths of its parameters, by name."""
        return {param.name: param.length for segment in self.segments for param in segment.params}

    def walk(self) -> Iterator[LaidModule]:
        """Itself and all modules inside it, outer ones first."""
        yield self
        for module in self.modules.values():
            yield from module.walk()


@dataclass(frozen=True)
class LaidUnion:
    """Modules that share their first position; `scaffold` is the one that stands in, or ""."""

    members: tuple[LaidModule, ...]
    start: int
    stop: int
    scaffold: str = ""


LaidItem: TypeAlias = Segment | LaidModule | LaidUnion


@dataclass(frozen=True)
class SchemaLayout:
    """A schema in tokens.

    Attributes:
        schema: the tree.
        root: all of it, as a module.
    """

    schema: Schema
    root: LaidModule

    @property
    def num_positions(self) -> int:
        return self.root.stop

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all segments together."""
        return sum(len(s.token_ids) for module in self.root.walk() for s in module.segments)

    @cached_property
    def num_modules(self) -> int:
        return sum(1 for _ in self.root.walk()) - 1

    def module(self, path: str) -> LaidModule:
        """Module of a path such as "overseas/tokyo".

        Raises:
            PmlError: there is none.
        """
        found = self.root
        for name in path.split("/"):
            if name not in found.modules:
                raise PmlError("the schema has no such module", parameter="module", value=path)
            found = found.modules[name]
        return found

    @cached_property
    def scaffolds(self) -> list[Scaffold]:
        """Scaffolds of the schema, in their order."""
        return [child for child in self.schema.children if isinstance(child, Scaffold)]


class ChatTokenizer(TemplatedTokenizer, Protocol):
    """Tokenizer of transformers, or another object with these of its methods."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of a text."""


class Tokens:
    """Encoder of text as token ids.

    Args:
        tokenizer: tokenizer of the model.
        placeholder: the token that stands in for arguments; None: the tokenizer's unknown token,
            or, where it has none, a space or its padding token.
    """

    def __init__(self, tokenizer: ChatTokenizer, placeholder: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._given = placeholder

    @cached_property
    def placeholder(self) -> int:
        """Token that stands in for arguments.

        Raises:
            PmlError: there is none.
        """
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        padding = getattr(self._tokenizer, "pad_token_id", None)
        for token in (self._given, unknown, *self.of(" ")[:1], padding):
            if token is not None:
                return int(token)
        raise PmlError("the tokenizer has no unknown token: name one", parameter="placeholder")

    def of(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def of_param(self, param: Param) -> tuple[int, ...]:
        """Token ids that stand in for an argument.

        Raises:
            PmlError: the scaffold of the parameter is longer than the parameter.
        """
        own = self.of(param.scaffold)
        if len(own) > param.length:
            raise wrong(
                f"the scaffold has {len(own)} tokens, and the parameter {param.length}",
                param,
                "scaffold",
                param.scaffold,
            )
        return own + (self.placeholder,) * (param.length - len(own))


def lay_out(schema: Schema, tokens: Tokens, chat: ChatTemplate) -> SchemaLayout:
    """Give every token of a schema its position.

    Raises:
        PmlError: a scaffold of a parameter is too long, or the chat template refuses the turns.
    """
    roles = list(_roles(schema))
    turns = iter([(role, *text) for role, text in zip(roles, chat.around(roles), strict=True)])
    return SchemaLayout(schema, _Layer(tokens, turns).module(schema, (), 0))


def _roles(node: MarkupNode) -> Iterator[str]:
    """Roles of all turns, in the order in which they are written."""
    for child in getattr(node, "children", ()):
        if isinstance(child, Turn):
            yield child.role
        yield from _roles(child)


class _Layer:
    """Layout of modules, one after the other."""

    def __init__(self, tokens: Tokens, turns: Iterator[tuple[str, str, str]]) -> None:
        self._tokens = tokens
        self._turns = turns

    def module(self, node: Module | Schema, path: tuple[str, ...], start: int) -> LaidModule:
        owner = _Owner(self._tokens, path, start)
        self._children(node, owner)
        owner.cut()
        return LaidModule(node, path, start, owner.stop, tuple(owner.items), tuple(owner.turns))

    def _children(self, node: Container, owner: _Owner) -> None:
        for child in node.children:
            if isinstance(child, Text):
                owner.texts.append(child.text)
            elif isinstance(child, Param):
                owner.param(child)
            elif isinstance(child, Turn):
                role, before, after = next(self._turns)
                owner.turns.append((len(owner.items), (role, before, after)))
                owner.texts.append(before)
                self._children(child, owner)
                owner.texts.append(after)
            elif isinstance(child, Module):
                owner.cut()
                owner.add(self.module(child, (*owner.path, child.name), owner.stop))
            elif isinstance(child, Union):
                owner.cut()
                owner.add(self._union(child, owner))

    def _union(self, node: Union, owner: _Owner) -> LaidUnion:
        start = owner.stop
        members = tuple(self.module(m, (*owner.path, m.name), start) for m in node.children)
        stop = max(member.stop for member in members)
        return LaidUnion(members, start, stop, node.scaffold)


class _Owner:
    """Parts of a module so far: items that are complete, tokens of a segment, and text."""

    def __init__(self, tokens: Tokens, path: tuple[str, ...], start: int) -> None:
        self.path = path
        self.stop = start  # of the items that are complete
        self.items: list[LaidItem] = []
        self.turns: list[tuple[int, tuple[str, str, str]]] = []
        self.texts: list[str] = []
        self._tokens = tokens
        self._ids: list[int] = []
        self._params: list[LaidParam] = []
        self._num_segments = 0

    def param(self, param: Param) -> None:
        self._end_text()
        self._params.append(LaidParam(param.name, len(self._ids), param.length))
        self._ids += self._tokens.of_param(param)

    def _end_text(self) -> None:
        self._ids += self._tokens.of("".join(self.texts))
        self.texts = []

    def cut(self) -> None:
        """End the segment here."""
        self._end_text()
        if self._ids:
            index = self._num_segments
            self._num_segments += 1
            if index >= MAX_SEGMENTS:
                raise PmlError(
                    f"modules may cut the text of one module {MAX_SEGMENTS} times: each of its "
                    "pieces reads those before it",
                    parameter="module",
                    value="/".join(self.path),
                )
            ids, params = tuple(self._ids), tuple(self._params)
            self.add(Segment(self.path, index, self.stop, ids, params))
            self._ids, self._params = [], []

    def add(self, item: LaidItem) -> None:
        self.items.append(item)
        self.stop = item.stop

# SPDX-License-Identifier: Apache-2.0
"""A schema that prompts can be made from: its layout, and the contexts of its segments.

A segment has one encoding of its own, and one more for each scaffold that it belongs to:

    context="modules"   it sees the segments of its own module before it, and nothing else
    context="schema"    and those, before it, of the modules around it and of the text that all
                        prompts have
    a scaffold          and those, before it, of all modules of the scaffold
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vllm_choreo.errors import PmlError, UnknownSchemaError
from vllm_choreo.pml.chat_template import ChatTemplate
from vllm_choreo.pml.layout import SchemaLayout, Segment, Tokens, lay_out
from vllm_choreo.pml.tree import Schema

CONTEXTS = ("modules", "schema")
ALONE = -1  # in place of a scaffold's number


class EncodingKey(NamedTuple):
    """An encoding of a segment: a module, its number there, a scaffold's number or `ALONE`."""

    schema: str
    path: tuple[str, ...]
    number: int
    scaffold: int


@dataclass(frozen=True, eq=False)
class RegisteredSchema:
    """A schema with its layout.

    Attributes:
        layout: where everything stands.
        context: what its modules are encoded behind.
        adapter: that encodes them, as a facade takes it; None: none.
    """

    layout: SchemaLayout
    context: str = "modules"
    adapter: Any = None

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise PmlError(f"choose one of {CONTEXTS}", parameter="context", value=self.context)

    @property
    def name(self) -> str:
        return self.layout.schema.name

    @cached_property
    def _segments(self) -> dict[tuple[tuple[str, ...], int], Segment]:
        """Those that are encoded once, by path and index."""
        return {
            (segment.path, segment.index): segment
            for module in self.layout.root.walk()
            if getattr(module.node, "cache", True)
            for segment in module.segments
        }

    @cached_property
    def _by_path(self) -> dict[tuple[str, ...], list[Segment]]:
        """Those, by the module that they are of."""
        found: dict[tuple[str, ...], list[Segment]] = {}
        for segment in self._segments.values():
            found.setdefault(segment.path, []).append(segment)
        return found

    def segment(self, key: EncodingKey) -> Segment:
        """The segment of an encoding.

        Raises:
            UnknownSchemaError: the key is that of another schema of the same name.
        """
        found = self._segments.get((key.path, key.number))
        if found is None:
            raise UnknownSchemaError(
                "the schema was deleted meanwhile", parameter="schema", value=key.schema
            )
        return found

    def needs(self, key: EncodingKey) -> list[EncodingKey]:
        """The encodings that an encoding reads, in the order of their positions."""
        segment = self.segment(key)
        if key.scaffold != ALONE:
            paths = self.involved(key.scaffold)
        elif self.context == "schema":
            paths = {key.path[:n] for n in range(len(key.path) + 1)}
        else:
            paths = {key.path}
        before = [
            other
            for path in paths
            for other in self._by_path.get(path, ())
            if other.stop <= segment.position
        ]
        before.sort(key=lambda other: other.position)
        return [key._replace(path=other.path, number=other.index) for other in before]

    def involved(self, scaffold: int) -> set[tuple[str, ...]]:
        """The paths that a scaffold encodes: its modules, those around them, the text of all."""
        return self._involved[scaffold]

    @cached_property
    def _involved(self) -> list[set[tuple[str, ...]]]:
        made = []
        for scaffold in self.layout.scaffolds:
            members = [tuple(member.split("/")) for member in scaffold.modules]
            made.append({names[:n] for names in members for n in range(len(names) + 1)})
        return made

    def scaffolds_of(self, chosen: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
        """Which scaffold each path is read from, when these are chosen.

        The largest scaffold of which all modules are chosen, then further ones that share no module
        with those before.
        """
        whole = []
        for number, scaffold in enumerate(self.layout.scaffolds):
            members = {tuple(path.split("/")) for path in scaffold.modules}
            if members <= set(chosen):
                whole.append((-len(members), number, members))
        applied: dict[tuple[str, ...], int] = {}
        taken: set[tuple[str, ...]] = set()
        for _, number, members in sorted(whole):
            if not members & taken:
                taken |= members
                applied = dict.fromkeys(self.involved(number), number) | applied
        return applied

    def all_keys(self) -> Iterator[EncodingKey]:
        """Every encoding that the schema can have."""
        for path, index in self._segments:
            yield EncodingKey(self.name, path, index, ALONE)
        for number in range(len(self.layout.scaffolds)):
            involved = self.involved(number)
            for path, index in self._segments:
                if path in involved:
                    yield EncodingKey(self.name, path, index, number)


def registered(
    schema: Schema, tokens: Tokens, chat: ChatTemplate, **options: Any
) -> RegisteredSchema:
    """A schema laid out.

    Raises:
        PmlError: as `lay_out`, or no such context.
    """
    return RegisteredSchema(lay_out(schema, tokens, chat), **options)

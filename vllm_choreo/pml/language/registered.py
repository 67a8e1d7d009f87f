# SPDX-License-Identifier: Apache-2.0
"""Schemas that prompts can be made from: the layout, and the contexts of segments.

A segment has one encoding of its own, and one more for each scaffold that it belongs to:

    context="modules"   it sees the segments of its own module before it, and nothing else
    context="schema"    and those, before it, of the modules around it and of the text that all
                        prompts have
    a scaffold          and those, before it, of all modules of the scaffold
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_choreo.errors import PmlError, UnknownSchemaError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import LaidUnion, SchemaLayout, Segment, Tokens, lay_out
from vllm_choreo.pml.language.tree import Schema

CONTEXTS = ("modules", "schema")
# Of a schema: what can be encoded of it, and what that reads in all. Each is a call of a session.
MAX_ENCODINGS = 10_000
MAX_READS = 1_000_000
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
        layout: positions of its tokens.
        context: one of `CONTEXTS`: which segments its modules are encoded behind.
        adapter: the adapter that encodes them, as a facade takes it; None: none.
    """

    layout: SchemaLayout
    context: str = "modules"
    adapter: object = None

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise PmlError(f"choose one of {CONTEXTS}", parameter="context", value=self.context)
        self._check_size()

    @property
    def name(self) -> str:
        return self.layout.schema.name

    @cached_property
    def _segments(self) -> dict[tuple[tuple[str, ...], int], Segment]:
        """Segments that are encoded once, by path and index."""
        return {
            (segment.path, segment.index): segment
            for module in self.layout.root.walk()
            if module.is_cached
            for segment in module.segments
        }

    @cached_property
    def _by_path(self) -> dict[tuple[str, ...], list[Segment]]:
        """Segments that are encoded once, by the path of their module."""
        found: dict[tuple[str, ...], list[Segment]] = {}
        for segment in self._segments.values():
            found.setdefault(segment.path, []).append(segment)
        return found

    def segment(self, key: EncodingKey) -> Segment:
        """Segment of an encoding.

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
        """Encodings that an encoding reads, in the order of their positions."""
        position = self.segment(key).position
        together, stops = self._together(key.scaffold, key.path)
        return together[: bisect_right(stops, position)]

    def with_needs(self, keys: Iterable[EncodingKey]) -> list[EncodingKey]:
        """Add all encodings that these read, each once, and after those it reads."""
        longest: dict[tuple[int, tuple[str, ...]], tuple[list[EncodingKey], int]] = {}
        for key in keys:
            position = self.segment(key).position
            together, stops = self._together(key.scaffold, key.path)
            # What a segment reads ends before it begins, hence it is the next one.
            count = bisect_right(stops, position) + 1
            group = _group(key.scaffold, key.path)
            if group not in longest or longest[group][1] < count:
                longest[group] = together, count
        return list(dict.fromkeys(k for keys, count in longest.values() for k in keys[:count]))

    def _together(
        self, scaffold: int, path: tuple[str, ...]
    ) -> tuple[list[EncodingKey], list[int]]:
        """Encodings that are made together, in order of position, and the position where each ends.

        None of them overlap: of a union, one module at most is in a scaffold, or around another.
        """
        group = _group(scaffold, path)
        if group not in self._groups:
            segments = [s for p in self._paths(scaffold, path) for s in self._by_path.get(p, ())]
            segments.sort(key=lambda segment: segment.position)
            keys = [EncodingKey(self.name, s.path, s.index, scaffold) for s in segments]
            self._groups[group] = keys, [segment.stop for segment in segments]
        return self._groups[group]

    def _paths(self, scaffold: int, path: tuple[str, ...]) -> set[tuple[str, ...]]:
        """Paths of the modules whose segments are encoded together."""
        if scaffold != ALONE:
            return self.involved(scaffold)
        if self.context == "schema":
            around = {path[:n] for n in range(len(path) + 1)}
            return around.union(*(self._stand_ins(owner, path) for owner in around))
        return {path}

    def _stand_ins(self, owner: tuple[str, ...], path: tuple[str, ...]) -> set[tuple[str, ...]]:
        """Paths of modules that stand in for unions of a module, but for those around `path`."""
        taken = path[len(owner)] if len(path) > len(owner) else None
        found: set[tuple[str, ...]] = set()
        for union in self._unions.get(owner, ()):
            members = {member.node.name for member in union.members}
            if union.scaffold and taken not in members:
                inner = (*owner, union.scaffold)
                found |= {inner} | self._stand_ins(inner, inner)
        return found

    @cached_property
    def _unions(self) -> dict[tuple[str, ...], list[LaidUnion]]:
        """Unions with a stand-in, by the path of the module or schema that they stand in."""
        return {
            module.path: found
            for module in self.layout.root.walk()
            if (found := [i for i in module.items if isinstance(i, LaidUnion) and i.scaffold])
        }

    @cached_property
    def _groups(
        self,
    ) -> dict[tuple[int, tuple[str, ...]], tuple[list[EncodingKey], list[int]]]:
        return {}

    def _check_size(self) -> None:
        """Refuse a schema of too many encodings, or too many that read one another, by counting.

        Raises:
            PmlError: there are too many.
        """
        own = {path: len(segments) for path, segments in self._by_path.items()}
        groups = [self._paths(ALONE, path) for path in own]
        groups += [self.involved(number) for number in range(len(self.layout.scaffolds))]
        sizes = [sum(own.get(path, 0) for path in paths) for paths in groups]
        scaffolds = sizes[len(own) :]
        reads = [count * size for count, size in zip(own.values(), sizes, strict=False)]
        reads += [size * size // 2 for size in scaffolds]
        for count, limit, what in (
            (sum(own.values()) + sum(scaffolds), MAX_ENCODINGS, "encodings"),
            (sum(reads), MAX_READS, "pieces that its pieces read"),
        ):
            if count > limit:
                raise PmlError(
                    f"a schema, with its scaffolds, has up to {limit} {what}: name fewer scaffolds "
                    "or modules, or put text that modules cut into modules of its own",
                    parameter="schema",
                    value=f"{count} {what}",
                )

    def involved(self, scaffold: int) -> set[tuple[str, ...]]:
        """Paths that a scaffold encodes: its modules, those around them, the text of all."""
        return self._involved[scaffold]

    @cached_property
    def _involved(self) -> list[set[tuple[str, ...]]]:
        made = []
        for scaffold in self.layout.scaffolds:
            members = [tuple(member.split("/")) for member in scaffold.modules]
            made.append({names[:n] for names in members for n in range(len(names) + 1)})
        return made

    def scaffolds_of(self, chosen: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
        """Scaffold that each path is read from, when these are chosen.

        The largest scaffold of which all modules are chosen, then further ones that share no module
        with those before.
        """
        whole, taken_paths = [], set(chosen)
        for number, scaffold in enumerate(self.layout.scaffolds):
            members = {tuple(path.split("/")) for path in scaffold.modules}
            if members <= taken_paths:
                whole.append((-len(members), number, members))
        applied: dict[tuple[str, ...], int] = {}
        taken: set[tuple[str, ...]] = set()
        for _, number, members in sorted(whole):
            if not members & taken:
                taken |= members
                applied = dict.fromkeys(self.involved(number), number) | applied
        return applied

    def union_keys(self, path: str) -> list[EncodingKey]:
        """Encodings of all members of the unions in which a module stands, its own included.

        Raises:
            PmlError: there is no such module, or it stands in no union.
        """
        self.layout.module(path)
        names = tuple(path.split("/"))
        found = [
            EncodingKey(self.name, segment.path, segment.index, ALONE)
            for owner in self.layout.root.walk()
            if owner.path == names[: len(owner.path)] and len(owner.path) < len(names)
            for item in owner.items
            if isinstance(item, LaidUnion)
            and names[len(owner.path)] in {member.node.name for member in item.members}
            for member in item.members
            if member.is_cached
            for segment in member.segments
        ]
        if not found:
            raise PmlError("the module stands in no union", parameter="module", value=path)
        return found

    def all_keys(self) -> Iterator[EncodingKey]:
        """Every encoding that the schema can have."""
        for path, index in self._segments:
            yield EncodingKey(self.name, path, index, ALONE)
        for number in range(len(self.layout.scaffolds)):
            involved = self.involved(number)
            for path, index in self._segments:
                if path in involved:
                    yield EncodingKey(self.name, path, index, number)


def _group(scaffold: int, path: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Key of what is encoded together: all of a scaffold, or what a module is encoded with."""
    return scaffold, path if scaffold == ALONE else ()


def registered(
    schema: Schema,
    tokens: Tokens,
    chat: ChatTemplate,
    context: str = "modules",
    adapter: object = None,
) -> RegisteredSchema:
    """Lay a schema out, and check its size.

    Raises:
        PmlError: as `lay_out`, or no such context.
    """
    return RegisteredSchema(lay_out(schema, tokens, chat), context, adapter)

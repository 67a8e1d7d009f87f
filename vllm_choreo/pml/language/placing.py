# SPDX-License-Identifier: Apache-2.0
"""Calls made of the row of a prompt: what is read from where, seen at which positions.

    layout="schema"    stored tokens and arguments stand where their schema has them; new text
                       stands after what precedes it, in the gap that modules which were not taken,
                       or short arguments, leave; a gap that is too small is an error
    layout="compact"   everything stands right after what precedes it

New tokens attend to all that stands before them, in the order of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.choosing import ChosenRow, Fresh, Item, PassedMessage, Stored
from vllm_choreo.pml.language.registered import ALONE, EncodingKey
from vllm_choreo.pml.language.tree import wrong

LAYOUTS = ("schema", "compact")


@dataclass(frozen=True)
class Part:
    """A parent of the calls of a prompt.

    Attributes:
        source: an encoding of a schema's segment; the number of an earlier call of the prompt; or
            the name of a message that is passed.
        start, stop: the tokens that are read; None: all of them.
        offset: position at which it is seen; None: after the part before.
    """

    source: EncodingKey | int | str
    start: int | None
    stop: int | None
    offset: int | None


@dataclass(frozen=True)
class FreshCall:
    """Tokens that a prompt encodes; they attend to the first `num_parts` parts."""

    token_ids: tuple[int, ...]
    num_parts: int
    offset: int | None


@dataclass(frozen=True)
class PromptUsage:
    """Counts of the tokens of a prompt, by where they came from.

    Attributes:
        module_tokens: tokens of modules, and of the text that all prompts have, as encoded once.
        argument_tokens: tokens of arguments.
        new_tokens: tokens of new text, of modules with cache="false", and of the chat template.
        message_tokens: tokens of messages that were passed, as far as their lengths are known.
    """

    module_tokens: int
    argument_tokens: int
    new_tokens: int
    message_tokens: int

    def __add__(self, other: PromptUsage) -> PromptUsage:
        return PromptUsage(
            self.module_tokens + other.module_tokens,
            self.argument_tokens + other.argument_tokens,
            self.new_tokens + other.new_tokens,
            self.message_tokens + other.message_tokens,
        )


@dataclass(frozen=True)
class PromptPlan:
    """Calls of a prompt: prefills, each of which may read those before it, then a decode.

    Attributes:
        parts: parts that the last call reads, in the order of text.
        calls: the prefills; the last call, whose tokens are the header.
        usage: where the tokens came from.
    """

    parts: tuple[Part, ...]
    calls: tuple[FreshCall, ...]
    usage: PromptUsage

    @property
    def header(self) -> FreshCall:
        return self.calls[-1]

    @property
    def keys(self) -> list[EncodingKey]:
        """Keys of the encodings that it reads, each once."""
        found = [part.source for part in self.parts if isinstance(part.source, EncodingKey)]
        return list(dict.fromkeys(found))


def place(row: ChosenRow, layout: str) -> PromptPlan:
    """Plan the calls of a row.

    Raises:
        PmlError: no such layout; new text that does not fit into its gap; a prompt that does not
            end with new text, after which there is nothing to generate from.
    """
    if layout not in LAYOUTS:
        raise PmlError(f"choose one of {LAYOUTS}", parameter="layout", value=layout)
    offsets = [None] * len(row.items) if layout == "compact" else _offsets(row.items)
    if not row.items or not isinstance(row.items[-1].content, Fresh):
        raise PmlError(
            "a prompt ends with new text, from which to go on: add text, or a turn of the user",
            parameter="prompt",
            value=row.schemas[0].name,
        )
    contexts = [
        schema.scaffolds_of(chosen) for schema, chosen in zip(row.schemas, row.chosen, strict=True)
    ]
    parts: list[Part] = []
    calls: list[FreshCall] = []
    groups = _group_fresh(row.items, offsets)
    for number, (items, offset) in enumerate(groups):
        content = items[0].content
        if isinstance(content, Fresh):
            ids = tuple(token for item in items for token in item.content.token_ids)  # type: ignore[union-attr]
            calls.append(FreshCall(ids, len(parts), offset))
            if number < len(groups) - 1:
                parts.append(Part(len(calls) - 1, None, None, offset))
        elif isinstance(content, Stored):
            which = items[0].number
            parts.append(_stored(content, row.schemas[which].name, contexts[which], offset))
        else:
            parts.append(Part(content.name, None, None, offset))
    return PromptPlan(tuple(parts), tuple(calls), _usage(row.items))


def _offsets(items: Sequence[Item]) -> list[int | None]:
    """Position of each item; None for items after a message of unknown length."""
    placed: list[int | None] = []
    end: int | None = 0  # of the items so far
    number, base = 0, 0  # the schema, and where its position 0 is
    for item in items:
        if item.number != number:
            number, base = item.number, -1
        if base < 0 and item.position is not None:
            base = _known(end, item)
        if item.position is None:
            placed.append(end)
        else:
            if _known(end, item) > base + item.position:
                raise _too_long(placed, items, base + item.position)
            placed.append(base + item.position)
        length, begins = item.content.num_tokens, placed[-1]
        end = None if length is None or begins is None else begins + length
    return placed


def _known(end: int | None, item: Item) -> int:
    if end is None:
        raise wrong(
            "the length of a passed message is not known, and a module follows it: pass a message "
            'that is complete, or use layout="compact"',
            item.node,
            "messages",
        )
    return end


def _too_long(placed: Sequence[int | None], items: Sequence[Item], limit: int) -> PmlError:
    """Make the error that the items up to here do not end by `limit`."""
    last = len(placed) - 1
    first = last
    while first > 0 and items[first - 1].position is None:
        first -= 1
    begins = placed[first]
    room = max(0, limit - begins) if begins is not None else 0
    num_new = sum(item.content.num_tokens or 0 for item in items[first : last + 1])
    return wrong(
        f"new text of {num_new} tokens does not fit into the gap of {room} before the module: put "
        'it at the end, give the module before it a parameter for it, or use layout="compact"',
        items[first].node,
        "prompt",
    )


def _group_fresh(
    items: Sequence[Item], offsets: Sequence[int | None]
) -> list[tuple[list[Item], int | None]]:
    """Join fresh items that stand one right after the other: they are one call."""
    groups: list[tuple[list[Item], int | None]] = []
    end: int | None = -1  # of the group before; None: it is not known, and all follows closely
    for item, offset in zip(items, offsets, strict=True):
        is_fresh = isinstance(item.content, Fresh)
        goes_on = groups and is_fresh and isinstance(groups[-1][0][-1].content, Fresh)
        if goes_on and (offset is None or offset == end):
            groups[-1][0].append(item)
        else:
            groups.append(([item], offset))
        length = item.content.num_tokens
        end = None if offset is None or length is None else offset + length
    return groups


def _stored(
    content: Stored, schema: str, scaffolds: dict[tuple[str, ...], int], offset: int | None
) -> Part:
    segment = content.segment
    key = EncodingKey(schema, segment.path, segment.index, scaffolds.get(segment.path, ALONE))
    if content.num_tokens == len(segment.token_ids):
        return Part(key, None, None, offset)
    return Part(key, content.start, content.stop, offset)


def _usage(items: Sequence[Item]) -> PromptUsage:
    counts = dict.fromkeys(("module", "argument", "new", "message"), 0)
    for item in items:
        content = item.content
        if isinstance(content, Stored):
            counts["module"] += content.num_tokens
        elif isinstance(content, PassedMessage):
            counts["message"] += content.num_tokens or 0
        else:
            counts["argument"] += content.num_argument
            counts["new"] += content.num_tokens - content.num_argument
    return PromptUsage(*counts.values())

# SPDX-License-Identifier: Apache-2.0
"""Pieces that a prompt takes of its schemas, and its own text, as one row in the order of text.

    <plan days="a week">   plan: "I have " (param days) "."  ->  stored  0…3   "I have "
      near the sea                                               fresh         "a week"
      <tokyo/>                                                   stored  8…9   "."
    </plan> What now?                                            fresh         "near the sea"
                                                                 stored        tokyo
                                                                 fresh         "What now?"

Text stands after the module that is named before it; if none is, before the one named after it;
text after all modules of a prompt stands at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.errors import UnknownSchemaError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import LaidModule, LaidUnion, Segment, Tokens
from vllm_choreo.pml.language.registered import RegisteredSchema
from vllm_choreo.pml.language.tree import Passed, Prompt, Text, TreeNode, Turn, Use, wrong

# Of all schemas that a prompt and those inside it name, each time that they do.
MAX_PIECES = 20_000


@dataclass(frozen=True)
class Stored:
    """Tokens `start … stop - 1` of a segment, as it is encoded."""

    segment: Segment
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fresh:
    """Tokens of this prompt alone; `num_argument` of them are those of arguments."""

    token_ids: tuple[int, ...]
    num_argument: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PassedMessage:
    """A message that was made at run time; None tokens: its length is not known."""

    name: str
    num_tokens: int | None


@dataclass(frozen=True)
class Item:
    """One item of the row.

    Attributes:
        content: tokens of a segment, tokens of the prompt, or a message.
        number: index of its schema among those of the prompt.
        position: position in its schema; None: right after the item before.
        node: the node that an error points at.
    """

    content: Stored | Fresh | PassedMessage
    number: int
    position: int | None
    node: TreeNode | None


@dataclass
class ChosenRow:
    """Items of a prompt.

    Attributes:
        schemas: schemas of the prompt and of those inside it.
        chosen: the paths of the modules that are taken, one set for each schema.
    """

    items: list[Item]
    schemas: list[RegisteredSchema]
    chosen: list[set[tuple[str, ...]]]


def choose(
    prompt: Prompt,
    schemas: Mapping[str, RegisteredSchema],
    tokens: Tokens,
    chat: ChatTemplate,
    lengths: Mapping[str, int | None],
    reorders: bool,
) -> ChosenRow:
    """Make the row of a prompt.

    Args:
        schemas: schemas that prompts may name, by name.
        lengths: tokens of the messages that are passed, by their names in the prompt.
        reorders: whether modules come in the prompt's order, or in the schema's.

    Raises:
        UnknownSchemaError: there is no schema of that name.
        PmlError: the schema does not have what the prompt takes; says where.
    """
    return _Chooser(schemas, tokens, chat, lengths, reorders).row(prompt)


class _Chooser:
    def __init__(
        self,
        schemas: Mapping[str, RegisteredSchema],
        tokens: Tokens,
        chat: ChatTemplate,
        lengths: Mapping[str, int | None],
        reorders: bool,
    ) -> None:
        self._known, self._tokens, self._chat = schemas, tokens, chat
        self._lengths, self._reorders = lengths, reorders
        self._turns: list[tuple[str, str, str]] = []
        self._row = ChosenRow([], [], [])
        self._num_steps = 0
        self._texts: list[str] = []  # new text that is not in an item yet
        self._node: TreeNode | None = None

    def row(self, prompt: Prompt) -> ChosenRow:
        self._schema(prompt)
        self._end(prompt)
        return self._row

    def _schema(self, prompt: Prompt) -> None:
        """Add the modules that a prompt takes of its schema."""
        if prompt.schema not in self._known:
            raise UnknownSchemaError(
                "there is no such schema: register it first",
                parameter="schema",
                value=prompt.schema,
            )
        schema = self._known[prompt.schema]
        self._row.schemas.append(schema)
        self._row.chosen.append(set())
        self._module(schema.layout.root, prompt)

    # -- modules -----------------------------------------------------------------------------

    def _module(self, laid: LaidModule, use: Use | Prompt) -> None:
        # A prompt may name a schema again and again, all of whose pieces it takes each time.
        self._num_steps += 1 + len(laid.items)
        if self._num_steps > MAX_PIECES:
            raise wrong(
                f"a prompt goes through {MAX_PIECES} pieces of schemas at most: name fewer",
                use,
                "prompt",
            )
        self._row.chosen[-1].add(laid.path)
        uses = _uses(laid, use)
        arguments = self._arguments(laid, use)
        texts = _Texts(use)
        slots = [name for name in laid.modules if name in uses]
        filled = dict(zip(slots, uses if self._reorders else slots, strict=True))
        for index, item in enumerate(laid.items):
            self._turns += [turn for begins, turn in laid.turns if begins == index]
            if isinstance(item, Segment):
                self._segment(laid, item, arguments, use)
                continue
            members = item.members if isinstance(item, LaidUnion) else [item]
            for slot in (m.node.name for m in members if m.node.name in filled):
                name = filled[slot]
                self._new(texts.before.get(name, ()))
                self._module(laid.modules[name], uses[name])
                self._new(texts.after.get(name, ()))
        self._turns += [turn for begins, turn in laid.turns if begins == len(laid.items)]
        if isinstance(use, Use):
            self._new(texts.at_end)

    def _arguments(self, laid: LaidModule, use: Use | Prompt) -> dict[str, tuple[int, ...]]:
        made = {}
        for name, value in getattr(use, "arguments", ()):
            if name not in laid.params:
                known = ", ".join(laid.params) or "none"
                raise wrong(
                    f"the module has no such parameter; it has {known}", use, "argument", name
                )
            ids, length = self._tokens.of(value), laid.params[name]
            if len(ids) > length:
                raise wrong(
                    f"the argument {name} has {len(ids)} tokens, and its parameter takes {length}",
                    use,
                    "argument",
                    value,
                )
            made[name] = ids
        return made

    def _segment(
        self,
        laid: LaidModule,
        segment: Segment,
        arguments: Mapping[str, tuple[int, ...]],
        use: Use | Prompt,
    ) -> None:
        """Add a segment, its arguments in place of the tokens that stand in for them."""
        row: list[tuple[int, Stored | Fresh]] = []
        start = 0
        for param in segment.params:
            if param.name in arguments:
                row.append((start, Stored(segment, start, param.start)))
                ids = arguments[param.name]
                row.append((param.start, Fresh(ids, len(ids))))
                start = param.stop
        row.append((start, Stored(segment, start, len(segment.token_ids))))
        if not laid.is_cached:
            row = [(0, _encoded_anew([content for _, content in row]))]
        for begins, content in row:
            if content.num_tokens:
                self._add(content, segment.position + begins, use)

    # -- new text ----------------------------------------------------------------------------

    def _end(self, prompt: Prompt) -> None:
        """Add what stands after all modules: text, prompts of other schemas, turns."""
        around: Iterator[str] | None = None
        for child in _Texts(prompt).at_end:
            if isinstance(child, Prompt):
                self._flush()
                self._schema(child)
                self._new(_Texts(child).at_end)
            elif isinstance(child, Turn):
                around = around or self._around(prompt)
                self._write(next(around), child)
                self._new(child.children)
            elif around is None:
                self._new([child])
        self._write(next(around or self._around(prompt)), prompt)
        self._flush()

    def _around(self, prompt: Prompt) -> Iterator[str]:
        """Texts that the chat template writes before, between and after the prompt's own turns."""
        own = [child.role for child in prompt.children if isinstance(child, Turn)]
        closing = prompt.children[-1] if prompt.children else None
        is_open = bool(own) and own[-1] == "assistant"
        roles = [*(role for role, _, _ in self._turns), *own]
        has_text = not own and isinstance(closing, (Text, Passed, Prompt))
        ends = bool(roles) and roles[-1] != "assistant" and not has_text
        return iter(self._chat.rest(self._turns, own, is_open, ends))

    def _new(self, contents: Sequence[Any]) -> None:
        """Add new text and passed messages, right after the last item."""
        for content in contents:
            if isinstance(content, Text):
                self._write(content.text, content)
            elif isinstance(content, Passed):
                if content.name not in self._lengths:
                    raise wrong(
                        "no message is passed under this name", content, "messages", content.name
                    )
                self._add(PassedMessage(content.name, self._lengths[content.name]), None, content)

    def _write(self, text: str, node: TreeNode) -> None:
        self._texts.append(text)
        self._node = node

    def _flush(self) -> None:
        ids, self._texts = self._tokens.of("".join(self._texts)), []
        if ids:
            self._add(Fresh(ids), None, self._node)

    def _add(
        self, content: Stored | Fresh | PassedMessage, position: int | None, node: TreeNode | None
    ) -> None:
        if self._texts:
            self._flush()
        self._row.items.append(Item(content, len(self._row.schemas) - 1, position, node))


class _Texts:
    """Places of the new text among the modules of a prompt, or inside one."""

    def __init__(self, use: Use | Prompt) -> None:
        self.before: dict[str, list[Any]] = {}
        self.after: dict[str, list[Any]] = {}
        self.at_end: list[Any] = []
        waiting: list[Any] = []
        name = None
        for child in use.children:
            if not isinstance(child, Use):
                waiting.append(child)
                continue
            (self.before if name is None else self.after)[name or child.name] = waiting
            waiting, name = [], child.name
        if name is None or isinstance(use, Prompt):
            self.at_end = waiting
        else:
            self.after[name] = waiting


def _uses(laid: LaidModule, use: Use | Prompt) -> dict[str, Use]:
    """Modules that are taken right inside another one, in the prompt's order."""
    uses: dict[str, Use] = {}
    for child in use.children:
        if not isinstance(child, Use):
            continue
        if child.name not in laid.modules:
            raise wrong(_unknown(laid, child.name), child, "module", child.name)
        if child.name in uses:
            raise wrong("a module is taken once", child, "module", child.name)
        uses[child.name] = child
    for union in (item for item in laid.items if isinstance(item, LaidUnion)):
        taken = [m.node.name for m in union.members if m.node.name in uses]
        if len(taken) > 1:
            later = max(taken, key=list(uses).index)
            raise wrong(
                f"{' and '.join(taken)} are of one union: take one of them",
                uses[later],
                "module",
                later,
            )
    return uses


def _unknown(laid: LaidModule, name: str) -> str:
    found = [m.path for m in laid.walk() if m.path and m.path[-1] == name]
    where = laid.title or "the schema"
    if found:
        outer = found[0][len(laid.path) : -1]
        return f"the module {name} is inside {'/'.join(outer)}: name it there"
    known = ", ".join(laid.modules) or "none"
    return f"{where} has no such module; it has {known}"


def _encoded_anew(row: Sequence[Stored | Fresh]) -> Fresh:
    """All tokens of a segment that is encoded with the prompt, without gaps."""
    ids: list[int] = []
    num_argument = 0
    for content in row:
        if isinstance(content, Fresh):
            ids += content.token_ids
            num_argument += content.num_argument
        else:
            ids += content.segment.token_ids[content.start : content.stop]
    return Fresh(tuple(ids), num_argument)

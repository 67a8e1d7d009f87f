# SPDX-License-Identifier: Apache-2.0
"""Plan of a chat: the parts of it that are known as messages, and those to be encoded.

A part is looked for in a *space*: only what was encoded for the same space is read in its place.

    context "seen"     one space for each adapter: a part is read as it was encoded, behind what
                       stood before it when it was first seen
    context "alone"    one space for each beginning: a part is encoded behind the beginning of its
                       chat alone

The *beginning* of a chat are its parts before the first that holds a text of another role than
"system" or "developer". With "alone", parts of the beginning itself stand behind those before them,
and answers, which are generated so, behind all that is before them: each such text is a space, too.
So what a chat reads depends on its own tokens and on nothing that anybody else has sent, whether
that is there already or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_choreo.chat.edits import anchors, find_edit, held_tokens
from vllm_choreo.chat.message_table import Digest, Entry, MessageTable, digest
from vllm_choreo.chat.parts import ANSWERS, ChatPart, Split, num_beginning
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

AUTO_MODES = ("exact", "choreo", "off")
# Where the parts of a chat end: behind its messages, or also inside long ones.
AUTO_CUTS = ("messages", "content")
# Behind what a part was encoded that is read: what stood before it when it was seen, or the
# beginning of its chat alone.
AUTO_CONTEXTS = ("seen", "alone")


def check_auto(value: object, parameter: str) -> str:
    """Return a mode, or raise ChoreoError if it is none of `AUTO_MODES`."""
    return _one_of(AUTO_MODES, value, parameter)


def check_cut(value: object, parameter: str) -> str:
    """Return where parts end, or raise ChoreoError if it is none of `AUTO_CUTS`."""
    return _one_of(AUTO_CUTS, value, parameter)


def check_context(value: object, parameter: str, mode: str) -> str:
    """Return behind what parts are encoded, or raise ChoreoError.

    Args:
        mode: mode of the chat; the context is a choice of mode "choreo" alone.
    """
    context = _one_of(AUTO_CONTEXTS, value, parameter)
    if mode != "choreo":
        raise UnsupportedOptionError(
            'the context is of mode "choreo": in the others an answer depends on the tokens of its '
            "chat alone; leave it out",
            parameter=parameter,
            value=value,
        )
    return context


def _one_of(choices: Sequence[str], value: object, parameter: str) -> str:
    if value not in choices:
        raise ChoreoError(f"choose one of {choices}", parameter=parameter, value=value)
    return str(value)


@dataclass(frozen=True)
class Matching:
    """Conditions on the messages that are read in place of the parts of a chat.

    Attributes:
        adapter: name of the adapter that encodes the chat, or "".
        context: one of `AUTO_CONTEXTS`.
        reads_edits: a part that differs from a known one in few tokens is read around them.
        is_repaired: the answer reads its parents with tokens encoded anew; what encodes its tokens
            later does not.
    """

    adapter: str = ""
    context: str = "seen"
    reads_edits: bool = False
    is_repaired: bool = False

    @classmethod
    def of(
        cls, mode: str, cut: str, context: str, keeps_states: bool, adapter: str, repair: object
    ) -> Matching:
        """Return how the parts of a chat are matched.

        Args:
            mode, cut, context: those of the chat. In mode "exact" the engine encodes anew whatever
                stands behind another beginning than it was encoded behind.
            keeps_states: the model has states in place of keys: messages are read whole, and in
                exact chains alone, which depend on nothing but their tokens.
            adapter: name of the adapter that encodes the chat, or "".
            repair: the rule by which the answer reads, or None.
        """
        is_free = mode == "choreo" and not keeps_states
        return cls(
            adapter,
            context if is_free else "seen",
            is_free and cut == "content",
            repair is not None,
        )

    @property
    def is_alone(self) -> bool:
        return self.context == "alone"

    def space(self, kind: str, *behind: bytes) -> str:
        """Space of messages, see `digest`.

        Args:
            kind, behind: with "alone", what they are, and the digests of the texts that they stand
                behind.
        """
        if not self.is_alone:
            return self.adapter
        return "\0".join((self.adapter, kind, *(one.hex() for one in behind)))

    def answer_space(self, before: bytes) -> str:
        """Space of the answer to a chat whose parts have this digest."""
        return self.space("repaired" if self.is_repaired else "answer", before)


@dataclass(frozen=True)
class EntrySpan:
    """Tokens `start … stop-1` of a message, as a chat reads them."""

    entry: Entry
    start: int
    stop: int

    @classmethod
    def whole(cls, entry: Entry) -> EntrySpan:
        """Read a message from its beginning to its end."""
        return cls(entry, 0, entry.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def parent(self) -> str | tuple[str, int, int]:
        """The parent of a call."""
        if self.num_tokens == self.entry.num_tokens:
            return self.entry.message_id
        return self.entry.message_id, self.start, self.stop

    def num_padded_tokens(self, block_size: int) -> int:
        """Positions of the context that it takes: those of whole blocks."""
        return (-(-self.stop // block_size) - self.start // block_size) * block_size


@dataclass(frozen=True)
class NewPart:
    """A part of a chat, or what differs in it, that no message holds yet.

    Attributes:
        number: index of the part in the chat.
        start: index of its first token in the chat.
        token_ids: its tokens.
        entry: entry of the message that is made of it.
        parents: spans of messages that it is encoded behind, in order.
    """

    number: int
    start: int
    token_ids: tuple[int, ...]
    entry: Entry
    parents: tuple[EntrySpan, ...]

    @property
    def stop(self) -> int:
        """Index of the token behind its last one."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ChatPlan:
    """Messages that a chat reads, and parts that are to be encoded for it.

    Attributes:
        parents: spans of messages that it reads, in order; those of `new` are still to be made.
        new: tokens that no message holds yet, in order.
        num_parts: parts of the chat.
        edited: indices of the parts of which some tokens are new and others read.
        header: the tokens behind all parts.
        header_content: the same by what they stand for, see `Split.content`.
        reason: the reason why the chat has no parts, or "".
        context: the digest of all parts: the context of the answer.
        answer_space: the space of the answer.
    """

    parents: list[EntrySpan] = field(default_factory=list)
    new: list[NewPart] = field(default_factory=list)
    num_parts: int = 0
    edited: frozenset[int] = frozenset()
    header: tuple[int, ...] = ()
    header_content: tuple[int, ...] = ()
    reason: str = ""
    context: bytes = b""
    answer_space: str = ""

    @property
    def entries(self) -> list[Entry]:
        """The messages that it reads, those to be made included; some of them twice."""
        return [span.entry for span in self.parents]

    @property
    def found(self) -> list[Entry]:
        """The messages that it reads and that are there already."""
        new = {id(piece.entry) for piece in self.new}
        return [entry for entry in self.entries if id(entry) not in new]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole chat."""
        return sum(span.num_tokens for span in self.parents) + len(self.header)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are to be encoded before the header."""
        return sum(len(piece.token_ids) for piece in self.new)

    def num_padded_tokens(self, block_size: int) -> int:
        """Positions of the context that its parents take, for each of them takes whole blocks."""
        return sum(span.num_padded_tokens(block_size) for span in self.parents)

    def answer_entry(self, message_id: str, token_ids: Sequence[int]) -> Entry:
        """Return the entry of the chat's answer.

        Args:
            token_ids: the header, and what was generated.
        """
        content = list(token_ids)
        if self.header_content != self.header:  # it has pictures
            content[: len(self.header)] = self.header_content
        key = digest(content, self.answer_space)
        return Entry(key, self.context, message_id, len(token_ids), is_answer=True)

    def report(self) -> dict[str, int]:
        """Counts of parts, of those that are known as a whole and of those that are read around an
        edit, with the tokens that are read and those that are encoded.
        """
        return {
            "parts": self.num_parts,
            "found": self.num_parts - len({piece.number for piece in self.new}),
            "edited": len(self.edited),
            "found_tokens": self.num_tokens - len(self.header) - self.num_new_tokens,
            "new_tokens": self.num_new_tokens,
        }


def plan_chat(
    split: Split,
    book: MessageTable,
    how: Matching,
    is_live: Callable[[Entry], bool],
    new_id: Callable[[], str],
) -> ChatPlan:
    """Look all parts of a chat up.

    An answer that was stopped by its length lacks the token that ends a turn in the next request.
    It is read as it is, and that token goes to the part behind it. A part that stands in a chat
    twice is one message, read twice.

    Of messages that hold the same tokens, such as two short answers, the one is read that was made
    behind the same text, if there is any.

    Args:
        split: parts of the chat.
        book: the tenant's messages; those that are gone are forgotten.
        how: which messages may be read.
        is_live: whether the message of an entry is still there.
        new_id: gives the ids of messages to be made.
    """
    return _Planner(split, book, how, is_live, new_id).plan()


_NOTHING: tuple[EntrySpan, ...] = ()


class _Planner:
    """Planner of one chat: `plan_chat`."""

    def __init__(
        self,
        split: Split,
        book: MessageTable,
        how: Matching,
        is_live: Callable[[Entry], bool],
        new_id: Callable[[], str],
    ) -> None:
        self._split, self._book, self._how = split, book, how
        self._is_live, self._new_id = is_live, new_id
        self._own: dict[bytes, Entry] = {}
        self._parents: list[EntrySpan] = []
        self._new: list[NewPart] = []
        self._edited: set[int] = set()
        # Of the text before a part; with "alone", of how it is cut, too: answers read it so.
        self._before = Digest(how.adapter)
        # Of the part at hand: where it is looked for, and what it is encoded behind.
        self._space, self._behind = how.adapter, _NOTHING
        self._beginning = b"", _NOTHING

    def plan(self) -> ChatPlan:
        content, parts = self._split.content, self._split.parts
        border, start = num_beginning(parts), 0
        for number, part in enumerate(parts):
            self._place(number <= border, number >= border and part.role in ANSWERS)
            stop = self._read(number, start, part)
            self._before.update(content[start:stop])
            if self._how.is_alone:
                self._before.update((-1,))
            start = stop
        return ChatPlan(
            self._parents,
            self._new,
            len(parts),
            frozenset(self._edited),
            self._split.token_ids[start:],
            content[start:],
            self._split.reason,
            self._before.value(),
            self._how.answer_space(self._before.value()),
        )

    def _place(self, is_at_beginning: bool, is_answer: bool) -> None:
        """Set where the next part is looked for, and what it is encoded behind."""
        before, read = self._before.value(), tuple(self._parents)
        if is_at_beginning:
            self._beginning = before, read
        if not self._how.is_alone:
            self._behind = read
        elif is_answer:
            self._space, self._behind = self._how.space("answer", before), read
        else:
            beginning, self._behind = self._beginning
            self._space = self._how.space("part", beginning)

    def _read(self, number: int, start: int, part: ChatPart) -> int:
        """Plan how a part is read that begins at `start`; return where what is read ends."""
        content = self._split.content
        entry = self._find(content[start : part.stop], self._space)
        # With "alone", what is read must not depend on whether the answer is there.
        if entry is None and part.stop - 1 > start and not self._how.is_alone:
            answer = self._find(content[start : part.stop - 1], self._space)
            if answer is not None and answer.is_answer:
                self._parents.append(EntrySpan.whole(answer))
                return part.stop - 1
        if entry is not None:
            self._parents.append(EntrySpan.whole(entry))
        elif not self._read_edited(number, start, content[start : part.stop]):
            self._make(number, start, content[start : part.stop], self._space, self._behind)
        return part.stop

    def _find(self, content: tuple[int, ...], space: str) -> Entry | None:
        key = digest(content, space)
        if key in self._own:
            return self._own[key]
        context = self._before.value()
        while (entry := self._book.find(key, context)) is not None and not self._is_live(entry):
            self._book.drop(entry)
        return entry

    def _read_edited(self, number: int, start: int, token_ids: tuple[int, ...]) -> bool:
        """Plan to read a part around what differs from a known one; return whether it can be.

        Not if it has pictures, which nothing may cut.
        """
        if not self._how.reads_edits or min(token_ids) < 0:
            return False
        alone = self._how.is_alone
        found = find_edit(token_ids, self._space, self._book, self._is_live, alone)
        if found is None:
            return False
        self._edited.add(number)
        head: tuple[EntrySpan, ...] = ()
        if found.head is not None:
            head = (EntrySpan(found.head, 0, found.num_head),)
        behind = (*self._behind, *head)
        self._parents += head
        differs = token_ids[found.num_head : len(token_ids) - found.num_tail]
        if differs:
            space = self._space
            if alone:
                space = f"{space}\0{digest(token_ids[: found.num_head]).hex()}"
            entry = self._find(differs, space)
            if entry is None:
                self._make(number, start + found.num_head, differs, space, behind)
            else:
                self._parents.append(EntrySpan.whole(entry))
        if found.tail is not None:
            stop = found.tail.num_tokens
            self._parents.append(EntrySpan(found.tail, stop - found.num_tail, stop))
        return True

    def _make(
        self,
        number: int,
        start: int,
        content: tuple[int, ...],
        space: str,
        behind: tuple[EntrySpan, ...],
    ) -> None:
        key = digest(content, space)
        token_ids = self._split.token_ids[start : start + len(content)]
        entry = Entry(key, self._before.value(), self._new_id(), len(token_ids))
        if self._how.reads_edits and min(content) >= 0:
            entry.anchors = anchors(token_ids, space)
            entry.token_ids = held_tokens(token_ids) if entry.anchors else None
        self._own[key] = entry
        self._new.append(NewPart(number, start, token_ids, entry, behind))
        self._parents.append(EntrySpan.whole(entry))

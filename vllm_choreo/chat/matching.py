# SPDX-License-Identifier: Apache-2.0
"""Plan of a chat: the parts of it that are known as messages, and those to be encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_choreo.chat.message_table import Digest, Entry, MessageTable, digest
from vllm_choreo.chat.parts import ChatPart, Split
from vllm_choreo.errors import ChoreoError

AUTO_MODES = ("exact", "choreo", "off")
# Where the parts of a chat end: behind its messages, or also inside long ones.
AUTO_CUTS = ("messages", "content")


def check_auto(value: object, parameter: str) -> str:
    """Return a mode, or raise ChoreoError if it is none of `AUTO_MODES`."""
    if value not in AUTO_MODES:
        raise ChoreoError(f"choose one of {AUTO_MODES}", parameter=parameter, value=value)
    return str(value)


def check_cut(value: object, parameter: str) -> str:
    """Return where parts end, or raise ChoreoError if it is none of `AUTO_CUTS`."""
    if value not in AUTO_CUTS:
        raise ChoreoError(f"choose one of {AUTO_CUTS}", parameter=parameter, value=value)
    return str(value)


@dataclass(frozen=True)
class NewPart:
    """A part of a chat that no message holds yet.

    Attributes:
        number: index of the part in the chat.
        part: the part as it is encoded, see `plan_chat`.
        token_ids: tokens of the part.
        entry: entry of the message that is made of it.
    """

    number: int
    part: ChatPart
    token_ids: tuple[int, ...]
    entry: Entry


@dataclass(frozen=True)
class ChatPlan:
    """Messages that a chat reads, and parts that are to be encoded for it.

    Attributes:
        parents: the messages of its parts, in order; those of `new` are still to be made.
        new: the parts that no message holds yet, in order; each is encoded behind all before it.
        header: the tokens behind all parts.
        reason: the reason why the chat has no parts, or "".
        context: the digest of all parts: the context of the answer.
    """

    parents: list[Entry] = field(default_factory=list)
    new: list[NewPart] = field(default_factory=list)
    header: tuple[int, ...] = ()
    reason: str = ""
    context: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole chat."""
        return sum(entry.num_tokens for entry in self.parents) + len(self.header)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are to be encoded before the header."""
        return sum(len(piece.token_ids) for piece in self.new)

    def num_padded_tokens(self, block_size: int) -> int:
        """Positions of the context that its parents take, for each of them takes whole blocks."""
        return sum(-(-entry.num_tokens // block_size) * block_size for entry in self.parents)

    def report(self) -> dict[str, int]:
        """Counts of parts, and of those that are known, with their tokens."""
        tokens = sum(entry.num_tokens for entry in self.parents)
        return {
            "parts": len(self.parents),
            "found": len(self.parents) - len(self.new),
            "found_tokens": tokens - self.num_new_tokens,
            "new_tokens": self.num_new_tokens,
        }


def plan_chat(
    split: Split,
    book: MessageTable,
    adapter: str,
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
        adapter: name of the adapter that encodes the request, or "".
        is_live: whether the message of an entry is still there.
        new_id: gives the ids of messages to be made.
    """
    plan = ChatPlan(reason=split.reason)
    own: dict[bytes, Entry] = {}

    def known(start: int, stop: int) -> Entry | None:
        key = digest(split.token_ids[start:stop], adapter)
        if key in own:
            return own[key]
        while (entry := book.find(key, context)) is not None and not is_live(entry):
            book.drop(entry)
        return entry

    start, before = 0, Digest(adapter)
    context = before.value()
    for number, part in enumerate(split.parts):
        stop = part.stop
        entry = known(start, stop)
        if entry is None and stop - 1 > start:
            open_answer = known(start, stop - 1)
            if open_answer is not None and open_answer.is_answer:
                entry, stop = open_answer, stop - 1
        if entry is None:
            token_ids = split.token_ids[start:stop]
            key = digest(token_ids, adapter)
            entry = own[key] = Entry(key, context, new_id(), len(token_ids))
            piece = ChatPart(start, stop, part.role, part.messages)
            plan.new.append(NewPart(number, piece, token_ids, entry))
        plan.parents.append(entry)
        before.update(split.token_ids[start:stop])
        start, context = stop, before.value()
    return ChatPlan(plan.parents, plan.new, split.token_ids[start:], split.reason, context)

# SPDX-License-Identifier: Apache-2.0
"""Messages of a tenant, by the tokens that they hold: the least recently used go first.

The table knows ids and digests, not messages: whoever has them makes and frees them. Of messages
that may be read in parts it knows the tokens, too (`edits.py`), 4 bytes each.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Of messages that begin, or end, alike, so many are compared with one that comes with an edit.
MAX_CANDIDATES = 4


@dataclass(eq=False)
class Entry:
    """A message that the table knows.

    Attributes:
        key: the digest of its tokens, and of the space in which it is looked for (`digest`).
        context: the digest of what stood before it where it was made.
        message_id: its id.
        num_tokens: its length.
        num_bytes: bytes of its pictures.
        is_answer: whether it was generated.
        num_users: requests that read it; it is not given up while there is one.
        anchors: digests of its first and of its last tokens, by which it is found when it comes
            again with an edit; None: it is found as a whole alone.
        token_ids: its tokens, if it has anchors.
    """

    key: bytes
    context: bytes
    message_id: str
    num_tokens: int
    is_answer: bool = False
    num_bytes: int = 0
    num_users: int = 0
    anchors: tuple[bytes, bytes] | None = None
    token_ids: array[int] | None = None


class Digest:
    """Digest of tokens, as they come, in a space: only messages of one space are found in it."""

    def __init__(self, space: str = "") -> None:
        self._made = blake2b(space.encode() + b"\0", digest_size=16)

    def update(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        self._made.update(array("q", token_ids).tobytes())

    def value(self) -> bytes:
        """Digest of all tokens so far."""
        return self._made.digest()


def digest(token_ids: Sequence[int], space: str = "") -> bytes:
    """Digest of tokens in a space: the name of the adapter that encodes them, and what they stand
    behind, where that matters.
    """
    made = Digest(space)
    made.update(token_ids)
    return made.value()


class MessageTable:
    """Messages of one tenant, by the digests of their tokens.

    Args:
        max_messages, max_tokens: the most that it keeps; more only while requests read them.
        max_bytes: the same of the bytes of their pictures.
    """

    def __init__(self, max_messages: int, max_tokens: int, max_bytes: int = sys.maxsize) -> None:
        self.max_messages = max_messages
        self.max_tokens = max_tokens
        self.max_bytes = max_bytes
        self.num_tokens = self.num_bytes = 0
        self._entries: OrderedDict[tuple[bytes, bytes], Entry] = OrderedDict()
        self._contexts: dict[bytes, dict[bytes, Entry]] = {}
        # By the digest of their first tokens, and of their last ones; the newest come last.
        self._heads: dict[bytes, list[Entry]] = {}
        self._tails: dict[bytes, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes, context: bytes = b"") -> Entry | None:
        """Find a message of this digest: the one that was made in this context, if there is any."""
        same = self._contexts.get(key)
        if same is None:
            return None
        return same.get(context) or next(iter(same.values()))

    def find_by_head(self, anchor: bytes) -> Sequence[Entry]:
        """Find messages whose first tokens have this digest: the newest, `MAX_CANDIDATES`."""
        return tuple(self._heads.get(anchor, ()))

    def find_by_tail(self, anchor: bytes) -> Sequence[Entry]:
        """Find messages whose last tokens have this digest: the newest, `MAX_CANDIDATES`."""
        return tuple(self._tails.get(anchor, ()))

    def has(self, entry: Entry) -> bool:
        """Return whether the table knows just this message."""
        return self._entries.get((entry.key, entry.context)) is entry

    def add(self, entry: Entry) -> None:
        """Enter a message; of two that are made alike in one context the first is kept."""
        if (entry.key, entry.context) not in self._entries:
            self._entries[entry.key, entry.context] = entry
            self._contexts.setdefault(entry.key, {})[entry.context] = entry
            self.num_tokens += entry.num_tokens
            self.num_bytes += entry.num_bytes
            for index, anchor in self._anchored(entry):
                same = index.setdefault(anchor, [])
                same.append(entry)
                del same[:-MAX_CANDIDATES]

    def drop(self, entry: Entry) -> None:
        """Forget a message that is no longer there. Forgetting twice does nothing."""
        if self.has(entry):
            del self._entries[entry.key, entry.context]
            same = self._contexts[entry.key]
            del same[entry.context]
            if not same:
                del self._contexts[entry.key]
            self.num_tokens -= entry.num_tokens
            self.num_bytes -= entry.num_bytes
            for index, anchor in self._anchored(entry):
                left = [other for other in index.get(anchor, ()) if other is not entry]
                if left:
                    index[anchor] = left
                else:
                    index.pop(anchor, None)

    def _anchored(self, entry: Entry) -> Iterable[tuple[dict[bytes, list[Entry]], bytes]]:
        return zip((self._heads, self._tails), entry.anchors or (), strict=False)

    def enter(self, entries: Iterable[Entry]) -> None:
        """Count a request as reading these messages, until it calls `leave`."""
        for entry in entries:
            entry.num_users += 1

    def touch(self, entries: Sequence[Entry]) -> None:
        """Mark messages as used, in this order."""
        for entry in reversed(entries):
            # Copies of a message go with those before it: so what comes first goes last.
            if self.has(entry):
                self._entries.move_to_end((entry.key, entry.context))

    def leave(self, entries: Iterable[Entry]) -> None:
        """Count a request no more that has read these messages."""
        for entry in entries:
            assert entry.num_users > 0, "left more often than entered"
            entry.num_users -= 1

    def make_room(self, num_messages: int, num_tokens: int, num_bytes: int = 0) -> list[Entry]:
        """Give up messages that nobody reads, so that there is room for new ones.

        Returns:
            The messages that are given up, for the caller to free.
        """
        victims: list[Entry] = []
        for entry in list(self._entries.values()):
            if (
                len(self) + num_messages <= self.max_messages
                and self.num_tokens + num_tokens <= self.max_tokens
                and self.num_bytes + num_bytes <= self.max_bytes
            ):
                break
            if not entry.num_users:
                self.drop(entry)
                victims.append(entry)
        return victims

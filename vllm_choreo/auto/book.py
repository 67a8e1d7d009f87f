# SPDX-License-Identifier: Apache-2.0
"""Which messages of a tenant hold which tokens: the least recently used go first.

The book knows ids and digests, not messages: whoever has them makes and frees them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(eq=False)
class Entry:
    """A message that the book knows.

    Attributes:
        key: the digest of its tokens, and of the adapter that encoded it.
        message_id: its id.
        num_tokens: its length.
        is_answer: it was generated.
        num_users: requests that read it; it is not given up while there is one.
    """

    key: bytes
    message_id: str
    num_tokens: int
    is_answer: bool = False
    num_users: int = 0


def digest(token_ids: Sequence[int], adapter: str = "") -> bytes:
    """Of tokens, and of the name of the adapter that encodes them."""
    made = blake2b(adapter.encode(), digest_size=16)
    made.update(b"\0")
    made.update(array("q", token_ids).tobytes())
    return made.digest()


class MessageBook:
    """The messages of one tenant, by what they hold.

    Args:
        max_messages, max_tokens: that it keeps; more only while requests read them.
    """

    def __init__(self, max_messages: int, max_tokens: int) -> None:
        self.max_messages = max_messages
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Entry | None:
        """The message of this digest."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Enter a message; of two with equal digests the first is kept: `find` before."""
        if entry.key not in self._entries:
            self._entries[entry.key] = entry
            self.num_tokens += entry.num_tokens

    def drop(self, entry: Entry) -> None:
        """Forget a message that is no longer there. Forgetting twice does nothing."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self.num_tokens -= entry.num_tokens

    def enter(self, entries: Iterable[Entry]) -> None:
        """A request reads these until it calls `leave`."""
        for entry in entries:
            entry.num_users += 1

    def touch(self, entries: Sequence[Entry]) -> None:
        """These are used, in this order."""
        for entry in reversed(entries):
            # Copies of a message go with those before it: so what comes first goes last.
            if entry.key in self._entries:
                self._entries.move_to_end(entry.key)

    def leave(self, entries: Iterable[Entry]) -> None:
        """The request is over."""
        for entry in entries:
            assert entry.num_users > 0, "left more often than entered"
            entry.num_users -= 1

    def make_room(self, num_messages: int, num_tokens: int) -> list[Entry]:
        """Give up messages that nobody reads, so that there is room for new ones.

        Returns:
            Those that are given up, for the caller to free.
        """
        victims: list[Entry] = []
        for entry in list(self._entries.values()):
            if (
                len(self) + num_messages <= self.max_messages
                and self.num_tokens + num_tokens <= self.max_tokens
            ):
                break
            if not entry.num_users:
                self.drop(entry)
                victims.append(entry)
        return victims

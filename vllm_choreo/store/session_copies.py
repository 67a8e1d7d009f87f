# SPDX-License-Identifier: Apache-2.0
"""The copies that calls of each session can read, within limits. Imports neither torch nor vllm.

A copy is made of other encodings, so that a forgotten one costs time, and is no loss. But each
order in which a session's messages are read makes copies of its own, without end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from vllm_choreo.errors import LimitError
from vllm_choreo.store.encoding import Encoding


@dataclass
class _Copies:
    """Copies of one session, the least recently read first, and the tokens of their recipes."""

    encodings: OrderedDict[Encoding, None] = field(default_factory=OrderedDict)
    num_tokens: int = 0


class SessionCopies:
    """Copies of all sessions, and the limits of each.

    Args:
        max_copies: copies of a session.
        max_tokens: tokens of these; each parent of a copy counts as a token, for there may be more
            parents than tokens.
    """

    def __init__(self, max_copies: int, max_tokens: int) -> None:
        self.max_copies = max_copies
        self.max_tokens = max_tokens
        self._of_session: dict[str, _Copies] = {}

    def add(self, copy: Encoding) -> None:
        """Count a copy that calls can read from now on."""
        copies = self._of_session.setdefault(copy.message.session, _Copies())
        assert copy not in copies.encodings
        copies.encodings[copy] = None
        copies.num_tokens += _size(copy)

    def discard(self, copy: Encoding) -> None:
        """Count a copy no more."""
        copies = self._of_session.get(copy.message.session)
        if copies is not None and copy in copies.encodings:
            del copies.encodings[copy]
            copies.num_tokens -= _size(copy)
            if not copies.encodings:
                del self._of_session[copy.message.session]

    def use(self, copy: Encoding) -> None:
        """Mark a copy that a call reads: it is the last one to make room."""
        copies = self._of_session.get(copy.message.session)
        if copies is not None and copy in copies.encodings:
            copies.encodings.move_to_end(copy)

    def is_full_for(self, copy: Encoding) -> bool:
        """Return whether a new copy exceeds a limit."""
        copies = self._of_session.get(copy.message.session, _Copies())
        return (
            len(copies.encodings) >= self.max_copies
            or copies.num_tokens + _size(copy) > self.max_tokens
        )

    def victim(self, copy: Encoding, protected: Collection[Encoding]) -> set[Encoding]:
        """Copies that make room for a new one: the least recently read, and all encoded with it.

        No call needs any of them, and `protected` holds none.

        Raises:
            LimitError: there are none.
        """
        copies = self._of_session.get(copy.message.session, _Copies()).encodings
        for _ in range(len(copies)):
            oldest = next(iter(copies))
            found = set(_with_readers(oldest))
            if not any(e.in_use or e.num_wanting or e in protected for e in found):
                return found
            copies.move_to_end(oldest)
        raise LimitError(
            f"calls that are running or waiting read as many copies of a session's messages as the "
            f"engine keeps ({self.max_copies} of {self.max_tokens} tokens and parents: "
            "additional_config.choreo.max_copies_per_session, max_copied_tokens_per_session): call "
            "again when they have ended, or list fewer parents",
            parameter="parents",
            value=copy.message.id,
        )

    def check(self, expected: Collection[Encoding]) -> None:
        """Count everything anew; for tests. Raises AssertionError."""
        counted = [e for copies in self._of_session.values() for e in copies.encodings]
        assert set(counted) == set(expected)
        for session, copies in self._of_session.items():
            assert copies.num_tokens == sum(map(_size, copies.encodings))
            assert all(copy.message.session == session for copy in copies.encodings)


def _with_readers(copy: Encoding) -> Iterator[Encoding]:
    """A copy, and all copies that were encoded with it, or with these."""
    frontier, seen = [copy], {copy}
    while frontier:
        yield (found := frontier.pop())
        fresh = found.readers - seen
        seen |= fresh
        frontier += fresh


def _size(copy: Encoding) -> int:
    return copy.num_tokens + len(copy.parents)

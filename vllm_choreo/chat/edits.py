# SPDX-License-Identifier: Apache-2.0
"""Edits of what is known: a piece that differs from a known one in few tokens is read around them.

    known     It is Monday, the 3rd. │ The house has nine rooms, and its door is red. …
    comes     It is Monday, the 4th. │ The house has nine rooms, and its door is red. …
              '-- read --' '- new -'   '------------------ read ---------------------'

A piece is looked for by its first tokens and by its last ones, its *anchors*: two lookups, each
of which gives a few candidates at most. What it has in common with the best of them from its
beginning on, and up to its end, is read there; the tokens between are a message of their own.

Of what stands behind an edit, keys and values are those of the tokens *as they were encoded*, which
have read the text before it was edited. Where no conversation may steer another, only what stands
before the edit is read: that has read nothing of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_choreo.chat.message_table import Entry, MessageTable, digest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Tokens of an anchor, and of what is read at either end: about those of a block of the KV cache.
ANCHOR_TOKENS = 16
# Less of a piece is not worth its reading in parts: each takes blocks of its own in the context.
MIN_READ_SHARE = 0.5
# Tokens that are encoded anew, at least: some behind an edit, which have read what was there.
MIN_NEW_TOKENS = 8


@dataclass(frozen=True)
class Edit:
    """A piece of which its beginning, its end or both are read in known messages.

    Attributes:
        head: message that begins as the piece does, or None.
        num_head: tokens that are read of its beginning.
        tail: message that ends as the piece does, or None.
        num_tail: tokens that are read of its end.
    """

    head: Entry | None
    num_head: int
    tail: Entry | None
    num_tail: int


def anchors(token_ids: Sequence[int], space: str) -> tuple[bytes, bytes] | None:
    """Anchors of a message in a space; None: it is too short to be read in parts."""
    if len(token_ids) < 2 * ANCHOR_TOKENS:
        return None
    return (
        digest(token_ids[:ANCHOR_TOKENS], f"{space}\0head"),
        digest(token_ids[-ANCHOR_TOKENS:], f"{space}\0tail"),
    )


def find_edit(
    token_ids: Sequence[int],
    space: str,
    book: MessageTable,
    is_live: Callable[[Entry], bool],
    head_alone: bool,
) -> Edit | None:
    """Find known messages in which most of a piece can be read.

    Args:
        token_ids: tokens of the piece, which no message holds.
        space: space of the piece, see `digest`.
        book: the tenant's messages.
        is_live: whether the message of an entry is still there.
        head_alone: read what stands before the edit alone.

    Returns:
        The messages; None: none has enough in common with the piece.
    """
    import numpy as np

    anchored = anchors(token_ids, space)
    if anchored is None:
        return None
    tokens, count = np.asarray(token_ids, dtype=np.int32), len(token_ids)
    head, num_head = _best(tokens, filter(is_live, book.find_by_head(anchored[0])), 1)
    tail, num_tail = None, 0
    if not head_alone and num_head < count:
        tail, num_tail = _best(tokens, filter(is_live, book.find_by_tail(anchored[1])), -1)
    num_head, num_tail = _leave_new(count, num_head, num_tail)
    if num_head + num_tail < MIN_READ_SHARE * count:
        return None
    return Edit(head if num_head else None, num_head, tail if num_tail else None, num_tail)


def _leave_new(count: int, num_head: int, num_tail: int) -> tuple[int, int]:
    """Leave tokens to be encoded between what is read: first of what stands behind them."""
    if num_head == count:
        return count, 0
    if num_tail == count:
        return 0, count
    num_tail = max(0, min(num_tail, count - MIN_NEW_TOKENS - num_head))
    if num_tail < ANCHOR_TOKENS:
        num_tail = 0
    num_head = max(0, min(num_head, count - MIN_NEW_TOKENS - num_tail))
    return (num_head if num_head >= ANCHOR_TOKENS else 0), num_tail


def _best(
    tokens: npt.NDArray[np.int32], candidates: Iterable[Entry], step: int
) -> tuple[Entry | None, int]:
    """The candidate that has most in common with a piece, from one end on, and how many tokens.

    Args:
        step: 1: from the beginning on; -1: from the end on.
    """
    best: tuple[Entry | None, int] = (None, 0)
    for entry in candidates:
        num_common = _num_common(tokens[::step], _tokens(entry)[::step])
        if num_common > best[1]:
            best = entry, num_common
    return best


def _tokens(entry: Entry) -> npt.NDArray[np.int32]:
    import numpy as np

    held = entry.token_ids
    assert held is not None, "what has anchors has tokens"
    return np.frombuffer(held, dtype=np.int32)


def held_tokens(token_ids: Sequence[int]) -> array[int]:
    """Tokens of a message as the table holds them, 4 bytes each."""
    return array("i", token_ids)


def _num_common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Number of tokens that two texts begin with in common."""
    import numpy as np

    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count

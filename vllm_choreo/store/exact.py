# SPDX-License-Identifier: Apache-2.0
"""Exact calls: the result is that of an ordinary request on the concatenated text.

A call is exact when its parents lie one right after the other, and each was itself encoded with
exactly the parents before it, at the same relative positions. A shift of everything changes
nothing, and a prefix of a message does not depend on the rest of it.

A call in exact mode is *made* exact. Parents that were encoded otherwise are read as *copies*, the
same tokens encoded with the chain before them:

    listed   A   B   C        A  encoded with nothing:   read as it is
    read     A   B'  C'       B  encoded alone:          read as B', encoded with A
                              C  encoded with A and B:   read as C', encoded with A and B'

A copy is an encoding like others: known before it is encoded, encoded when a call needs it,
evicted, encoded again. So all that exact mode adds is the choice of what to read (`exact_chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from vllm_choreo.semantics.positions import is_text
from vllm_choreo.store.copies import Context, Link
from vllm_choreo.store.encoding import Adapter
from vllm_choreo.store.store import MessageStore


def is_exact(
    links: Sequence[Link],
    offsets: Sequence[int],
    new_offset: int,
    adapter: Adapter | None = None,
    from_zero: bool = False,
    whole: bool = False,
) -> bool:
    """Return whether a call gives what an ordinary request on the concatenated text gives.

    Args:
        links: the parents of the call.
        offsets, new_offset: positions of their first tokens, and of the call's own.
        adapter: the one that encodes the call.
        from_zero: whether text gives the same at position 0 alone, see `is_text`.
        whole: whether the parents must be whole messages, see `exact_chain`.
    """
    lengths = [link.num_positions for link in links]
    num_chained = num_in_chain(links, offsets, adapter, whole)
    return num_chained == len(links) and is_text(lengths, offsets, new_offset, from_zero)


def num_in_chain(
    links: Sequence[Link], offsets: Sequence[int], adapter: Adapter | None, whole: bool = False
) -> int:
    """Number of first parents each of which was encoded with exactly those before it.

    Args:
        links, offsets, adapter, whole: see `is_exact`.
    """
    for number, (link, offset) in enumerate(zip(links, offsets, strict=True)):
        if not Context(links[:number], offsets[:number], adapter).has(link, offset, whole):
            return number
    return len(links)


def exact_chain(links: Sequence[Link], adapter: Adapter | None, store: MessageStore) -> list[Link]:
    """Links that a call in exact mode reads: its parents where these are exact, else copies.

    Args:
        links: the parents of the call; their tokens and plans are known.
        adapter: the one that encodes the call.
        store: keeps copies, so that each is encoded once. If its model has states, these are kept
            at the ends of messages alone, so that the beginning of one is read as a copy, too.

    Returns:
        One link per parent, of the same tokens, beginning with the first token of its message.
    """
    whole = store.states is not None
    chain: list[Link] = []
    for link in links:
        lengths = [before.num_positions for before in chain]
        *offsets, position = accumulate(lengths, initial=0)
        context = Context(chain, offsets, adapter, exact=True)
        chain = [
            *chain,
            link if context.has(link, position, whole) else context.copy(link, position, store),
        ]
    return chain

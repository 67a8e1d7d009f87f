# SPDX-License-Identifier: Apache-2.0
"""Repaired calls: chosen tokens of the parents are encoded anew in the call's own context.

    listed   A   B   C
    runs     -   B[0:32]   C[0:32], C[64:96]
    read     A   B*        C*          B* a patch of B, its runs encoded with A
                                       C* a patch of C, its runs encoded with A and B*

A patch is an encoding like others: known before it is encoded, shared by all calls with the same
context, evicted, encoded again. It may be anew in some layers alone. A parent of which every token
is repaired in all layers is a plain copy, as exact calls read them; one that was encoded with what
the call reads before it needs no repair.

A state has no tokens that could be put between others. In models with states the first tokens of
a parent can be repaired, at the seam: it is read in two, these as a copy, and the rest as it is,
which does to the state behind them what it does to any (`Context.cut`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.runs import TokenRanges, num_tokens
from vllm_choreo.store.copies import Context, Link
from vllm_choreo.store.encoding import Adapter
from vllm_choreo.store.hidden import check_entries
from vllm_choreo.store.store import MessageStore


class RepairedChain(NamedTuple):
    """Links that a repaired call reads for the parents that it lists.

    Attributes:
        links: one per parent, of the same tokens; two of one that is read in two.
        offsets: positions at which the call sees the first token of each.
        num_repaired: tokens that are encoded anew.
    """

    links: list[Link]
    offsets: list[int]
    num_repaired: int


def repaired_chain(
    links: Sequence[Link],
    offsets: Sequence[int],
    runs: Sequence[TokenRanges],
    adapter: Adapter | None,
    store: MessageStore,
    layers: LayerRanges | None = None,
) -> RepairedChain:
    """Find what a repaired call reads for its parents, and count the tokens repaired.

    Args:
        links: the parents of the call; their tokens and plans are known.
        offsets: positions at which the call sees the first token of each.
        runs: runs of each parent, counted from the first token that the call sees. Where there are
            states, of whole messages, and each a message's first tokens.
        adapter: the one that encodes the call.
        store: keeps copies, so that each is encoded once.
        layers: layers in which the runs are encoded anew; None: all.

    Raises:
        RepairError: the hidden states at the first layer of a range were not captured.
    """
    chain: list[Link] = []
    seen_at: list[int] = []
    num_repaired = 0
    for link, offset, of_link in zip(links, offsets, runs, strict=True):
        context, read = Context(chain, seen_at, adapter), [link]
        if of_link and not context.has(link, offset):
            num_repaired += num_tokens(of_link)
            if layers is not None:
                check_entries(link.encoding, layers)
            if layers is None and of_link == ((0, link.num_tokens),):
                read = [context.copy(link, offset, store)]
            elif store.states is not None:
                ((_, num_first),) = of_link
                read = context.cut(link, num_first, offset, store)
            else:
                read = [context.patch(link, of_link, offset, store, layers)]
        chain = [*chain, *read]
        lengths = [part.num_tokens for part in read[:-1]]
        seen_at = [*seen_at, *accumulate(lengths, initial=offset)]
    return RepairedChain(chain, seen_at, num_repaired)

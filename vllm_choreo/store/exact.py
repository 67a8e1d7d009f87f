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
from dataclasses import dataclass

from vllm_choreo.semantics.positions import CallPlan, ParentPlan, is_text, num_span_blocks
from vllm_choreo.store.encoding import Adapter, Encoding
from vllm_choreo.store.store import MessageStore


@dataclass(frozen=True)
class Link:
    """Tokens `start … stop-1` of an encoding, as one parent of a call."""

    encoding: Encoding
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def is_exact(
    links: Sequence[Link], offsets: Sequence[int], new_offset: int, adapter: Adapter | None = None
) -> bool:
    """Whether a call gives what an ordinary request on the concatenated text gives.

    Args:
        links: the parents of the call.
        offsets, new_offset: where the call sees them, and itself stands.
        adapter: the one that encodes the call.
    """
    return is_text([link.num_tokens for link in links], offsets, new_offset) and all(
        _continues(links[:j], link, adapter) for j, link in enumerate(links)
    )


def exact_chain(links: Sequence[Link], adapter: Adapter | None, store: MessageStore) -> list[Link]:
    """What a call in exact mode reads for its parents: themselves where they are exact, or copies.

    Args:
        links: the parents of the call; their tokens and plans are known.
        adapter: the one that encodes the call.
        store: keeps copies, so that each is encoded once.

    Returns:
        One link per parent, of the same tokens, beginning with the first token of its message.
    """
    chain: list[Link] = []
    for link in links:
        if not _continues(chain, link, adapter):
            parents, plan = plan_after(chain, store.block_size)
            copy = store.copy(link.encoding, link.start, link.stop, adapter, parents, plan)
            link = Link(copy, 0, copy.num_tokens)
        chain.append(link)
    return chain


def _continues(chain: Sequence[Link], link: Link, adapter: Adapter | None) -> bool:
    """Whether `link` was encoded with exactly `chain`, right before it."""
    encoding, plan = link.encoding, link.encoding.plan
    assert plan is not None, "the parents of a call that is planned have their plans"
    if link.start != 0 or encoding.adapter != adapter or len(chain) != len(encoding.parents):
        return False
    position = plan.new_offset - sum(before.num_tokens for before in chain)
    for before, parent, span in zip(chain, encoding.parents, plan.parents, strict=True):
        # Encodings count by identity: a name may be given again after it was freed.
        read = (parent, span.start, span.stop, span.offset)
        if read != (before.encoding, before.start, before.stop, position):
            return False
        position += before.num_tokens
    return True


def plan_after(chain: Sequence[Link], block_size: int) -> tuple[tuple[Encoding, ...], CallPlan]:
    """The parents and the plan of what is encoded after `chain`, from position 0 on."""
    spans, position = [], 0
    for link in chain:
        spans.append(ParentPlan(link.encoding.message.id, link.start, link.stop, position))
        position += link.num_tokens
    base = block_size * sum(num_span_blocks(s.start, s.stop, block_size) for s in spans)
    plan = CallPlan(tuple(spans), position, base, True)
    return tuple(link.encoding for link in chain), plan

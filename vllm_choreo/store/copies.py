# SPDX-License-Identifier: Apache-2.0
"""Copies: tokens of a message encoded in another context, all of them or some. Made on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.runs import TokenRanges
from vllm_choreo.semantics.positions import CallPlan, ParentPlan, num_span_blocks
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.encoding import Adapter, Encoding, Patch
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


@dataclass(frozen=True)
class Context:
    """A chain of parents behind which tokens are encoded.

    Attributes:
        chain: links that the tokens attend to, in order.
        offsets: positions at which they see the first token of each link.
        adapter: the adapter that encodes them, or None.
        exact: whether the chain is encoded and placed as in an ordinary request on its text.
    """

    chain: Sequence[Link]
    offsets: Sequence[int]
    adapter: Adapter | None
    exact: bool = False

    @classmethod
    def of(cls, encoding: Encoding) -> Context:
        """Context in which an encoding is encoded, by its plan."""
        plan = encoding.plan
        assert plan is not None, "parents that are read have their plans"
        chain = [
            Link(parent, span.start, span.stop)
            for parent, span in zip(encoding.parents, plan.parents, strict=True)
        ]
        offsets = [span.offset for span in plan.parents]
        return cls(chain, offsets, encoding.adapter, plan.exact)

    def behind(self, link: Link, offset: int) -> Context:
        """Context behind one link more."""
        return replace(self, chain=[*self.chain, link], offsets=[*self.offsets, offset])

    def plan(self, position: int, store: MessageStore, start: int = 0) -> CallPlan:
        """Plan of an encoding whose token `start` is the first seen, and stands at `position`.

        Tokens before it take no place among the slots of a request, hence `base` is that of token
        0 if it were there.
        """
        spans = tuple(
            ParentPlan(link.encoding.message.id, link.start, link.stop, offset)
            for link, offset in zip(self.chain, self.offsets, strict=True)
        )
        size = store.block_size
        num_blocks = sum(num_span_blocks(span.start, span.stop, size) for span in spans)
        base = size * (num_blocks - start // size)
        return CallPlan(spans, position - start, base, self.exact, is_placed=store.is_placed)

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        return tuple(link.encoding for link in self.chain)

    def has(self, link: Link, position: int, whole: bool = False) -> bool:
        """Return whether a link's tokens, the first at `position`, were encoded in this context.

        A shift of everything changes nothing, unless plans are placed, and a prefix does not
        depend on what follows it.

        Args:
            whole: whether that is asked of whole messages alone, see `exact_chain`.
        """
        encoding, plan = link.encoding, link.encoding.plan
        if whole and link.num_tokens != encoding.num_tokens:
            return False
        assert plan is not None, "the parents of a call that is planned have their plans"
        if encoding.patch or plan.weights or link.start != 0 or encoding.adapter != self.adapter:
            return False
        if encoding.nonce:  # so its recipe says, and nobody knows
            return False
        shift = position - plan.new_offset
        if shift and plan.is_placed:
            return False
        read = [
            (parent, span.start, span.stop, span.offset + shift)
            for parent, span in zip(encoding.parents, plan.parents, strict=True)
        ]
        # Encodings count by identity: a name may be given again after it was freed.
        return read == [
            (before.encoding, before.start, before.stop, offset)
            for before, offset in zip(self.chain, self.offsets, strict=True)
        ]

    def copy(self, link: Link, position: int, store: MessageStore) -> Link:
        """Link to a copy: all tokens of a link in this context, the first of them at `position`."""
        source, plan = link.encoding, self.plan(position, store)
        assert source.token_ids is not None
        traces = tuple(parent.trace for parent in self.encodings)
        trace = Trace(source.message.id, traces, source.trace.origin)
        tokens = source.token_ids[link.start : link.stop]
        copy = Encoding(source.message, trace, self.adapter, tokens, self.encodings, plan)
        copy = store.find_or_add_copy(copy, source, copy.num_tokens)
        return Link(copy, 0, copy.num_tokens)

    def patch(
        self,
        link: Link,
        runs: TokenRanges,
        position: int,
        store: MessageStore,
        layers: LayerRanges | None = None,
    ) -> Link:
        """Link to a patch: runs of a link encoded in this context, its other tokens as they are.

        Args:
            runs: `(start, stop)` each, counted from the first token of the link.
            position: position of that token.
            layers: layers in which they are encoded, see `Patch`; None: all.
        """
        source, plan = link.encoding, self.plan(position, store, link.start)
        moved = tuple((start + link.start, stop + link.start) for start, stop in runs)
        patch = Patch(source, link.start, moved, layers)
        traces = (source.trace, *(parent.trace for parent in self.encodings))
        trace = Trace(source.message.id, traces, source.trace.origin)
        tokens = source.token_ids
        copy = Encoding(source.message, trace, self.adapter, tokens, self.encodings, plan, patch)
        return Link(store.find_or_add_copy(copy, source, patch.num_charged), link.start, link.stop)

    def cut(self, link: Link, num_first: int, position: int, store: MessageStore) -> list[Link]:
        """Links to copies of a message in two: its first tokens in this context, the rest as it is.

        The rest is encoded once more, behind the first tokens, in the context of the message: so it
        has a state of its own, and what its tokens do to any.

        Args:
            position: position of the first token.
        """
        source = link.encoding
        first, rest = (Link(source, 0, num_first), Link(source, num_first, source.num_tokens))
        own, plan = Context.of(source), source.plan
        assert plan is not None
        head = own.copy(first, plan.new_offset, store)
        tail = own.behind(head, plan.new_offset).copy(rest, plan.new_offset + num_first, store)
        return [self.copy(first, position, store), tail]

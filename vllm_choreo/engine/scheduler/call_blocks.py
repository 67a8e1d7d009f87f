# SPDX-License-Identifier: Apache-2.0
"""Blocks of calls, by KV cache group: those they read of their parents, and those of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.semantics.positions import CallPlan, ParentPlan
from vllm_choreo.store.block_copies import Block
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import Blocks
from vllm_choreo.store.store import MessageStore


class CallBlocks:
    """Blocks that calls read, and that they go on from."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.block_size = store.block_size

    # -- of parents ------------------------------------------------------------------------

    def wanted(self, call: ScheduledCall) -> Iterator[tuple[Encoding, Sequence[range] | None]]:
        """Parents of a call, each with the blocks of each group that it reads; None: all."""
        plan = call.watching.plan if call.plan is None and call.watching else call.plan
        if plan is None or not self.store.groups.has_windows:
            yield from zip(call.parents, repeat(None))
        else:
            yield from self._seen(call.parents, plan, call.run[0] if call.run else 0)

    def wanted_by_patch(self, patch: Encoding) -> Iterator[tuple[Encoding, Sequence[range]]]:
        """Parents of a patch, each with the blocks of each group that its first run reads."""
        assert patch.plan is not None and patch.patch is not None
        yield from self._seen(patch.parents, patch.plan, patch.patch.runs[0][0])

    def _seen(
        self, parents: Sequence[Encoding], plan: CallPlan, first: int
    ) -> Iterator[tuple[Encoding, Sequence[range]]]:
        """Parents, each with the blocks of each group that own tokens from `first` on see."""
        for parent, span in zip(parents, plan.parents, strict=True):
            yield parent, self.store.groups.seen(span, plan.new_offset + first)

    def sees_more(self, call: ScheduledCall, encoding: Encoding) -> bool:
        """Return whether a call sees more of a parent than the parent keeps for who comes next."""
        kept = self.store.groups.kept(encoding.num_tokens)
        return any(
            seen.start < first and seen
            for parent, wanted in self.wanted(call)
            if parent is encoding and wanted is not None
            for seen, first in zip(wanted, kept, strict=True)
        )

    def of_span(self, encoding: Encoding, span: ParentPlan) -> list[list[Block]]:
        """Blocks in which a span of a resident encoding lies, by KV cache group."""
        first, end = span.start // self.block_size, -(-span.stop // self.block_size)
        return [of_group[first:end] for of_group in encoding.blocks]

    def of_parents(self, call: ScheduledCall) -> Blocks:
        """Blocks with which the call's block tables start: those of its parents' spans."""
        assert call.plan is not None
        return self.tables(zip(call.parents, call.plan.parents, strict=True))

    def tables(self, spans: Iterable[tuple[Encoding, ParentPlan]]) -> Blocks:
        """Blocks of spans, one after the other, by KV cache group."""
        tables: list[list[Block]] = [[] for _ in self.store.groups.windows]
        for encoding, span in spans:
            for table, blocks in zip(tables, self.of_span(encoding, span), strict=True):
                table += blocks
        return tables

    # -- of the call itself ----------------------------------------------------------------

    def own_part(self, call: ScheduledCall, blocks: Blocks) -> Blocks:
        """Part of a call's block tables that holds its own tokens."""
        assert call.plan is not None
        return [of_group[call.plan.base // self.block_size :] for of_group in blocks]

    def of_itself(self, call: ScheduledCall) -> Blocks:
        """Full blocks of the call's own encoding that exist already, and that it can go on from."""
        encoding = call.encoding
        # At least one token is left to run: a request without any cannot be scheduled.
        num_reused = max(0, min(encoding.num_encoded, encoding.num_tokens - 1)) // self.block_size
        # It runs all tokens for the sake of the state behind them, or of gaps.
        is_anew = self.store.states is not None and encoding.state is None
        is_anew |= call.closes_gaps or not num_reused
        if is_anew or not self.store.groups.can_go_on(
            encoding.blocks, num_reused * self.block_size
        ):
            return [[] for _ in self.store.groups.windows]
        return [of_group[:num_reused] for of_group in encoding.blocks]

    def left_behind(self, call: ScheduledCall, num_computed: int, group: int) -> range:
        """Blocks of a running call's table that nobody reads any more in the layers of a group.

        Those of its own tokens, while the message is encoded: of what it reads it holds all.

        Args:
            num_computed: virtual index before which all tokens are encoded.
        """
        assert call.plan is not None
        first = call.plan.base // self.block_size
        if call.encoding.is_kept_whole or call.run is not None:
            return range(first, first)
        kept = self.store.groups.kept(max(0, num_computed - call.plan.base))
        return range(first, first + kept[group])

    def give_up_gaps(self, call: ScheduledCall) -> bool:
        """Evict what a call encodes again because of its gaps, if it can; return whether it did.

        It was left, for others read it, as long as there was room for it twice.
        """
        encoding = call.encoding
        can_give_up = call.closes_gaps and bool(encoding.blocks) and not encoding.num_readers
        if can_give_up:
            is_kept_whole = encoding.is_kept_whole
            self.store.evict(encoding, into_host=False)
            encoding.is_kept_whole = is_kept_whole
        return can_give_up

    def of_run(self, call: ScheduledCall) -> tuple[Blocks, int]:
        """Block tables of a run, its own slots included, and the number of tokens before it."""
        assert call.plan is not None and call.run is not None and call.encoding.patch
        start, stop = call.run
        return self.of_patch(call.encoding, stop), call.plan.base + start

    def of_patch(self, encoding: Encoding, stop: int) -> Blocks:
        """Block tables for writing into a patch up to its token `stop`, which is left out."""
        assert encoding.plan is not None and encoding.patch is not None
        own = ParentPlan(encoding.message.id, encoding.patch.start, stop, 0)
        return self.tables(
            zip((*encoding.parents, encoding), (*encoding.plan.parents, own), strict=True)
        )

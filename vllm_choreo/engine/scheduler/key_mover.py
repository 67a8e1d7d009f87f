# SPDX-License-Identifier: Apache-2.0
"""The policy that moves keys instead of queries: in place, or into a copy.

It serves attention that cannot rotate queries, and messages that are read often at one place.
The other policy needs no code here: spans carry the rotation of the query.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.memory_changes import BlockMove
from vllm_choreo.semantics.positions import ParentPlan
from vllm_choreo.store.block_copies import Block
from vllm_choreo.store.encoding import Encoding


@dataclass
class _Placement:
    """One parent as a call reads it: its blocks, and where their first key will be stored."""

    encoding: Encoding
    blocks: list[Block]
    stored_position: int
    delta: int = 0
    is_copy: bool = False


class KeyMover:
    """Choice, per parent of a starting call, whether its keys move; and the moves of a step.

    Call `place` when vLLM asks for the blocks; `commit` or `withdraw` when it could, or could not,
    allocate the rest of the call.
    """

    def __init__(self, call_table: CallTable, pool: BlockPool) -> None:
        self.call_table = call_table
        self.pool = pool
        self._moves: list[BlockMove] = []
        self._placed: dict[ScheduledCall, list[_Placement]] = {}

    def take_moves(self) -> list[BlockMove]:
        """Take the moves of the step just planned; those in place first: copies may read them."""
        moves, self._moves = self._moves, []
        return sorted(moves, key=lambda move: move.src != move.dst)

    def place(self, call: ScheduledCall) -> list[Block]:
        """Return the parents' blocks: copies where keys must move and others read them."""
        self.withdraw(call)
        assert call.plan is not None
        placements = [
            self._place(call, parent, span)
            for parent, span in zip(call.parents, call.plan.parents, strict=True)
        ]
        self._placed[call] = placements
        return [block for placement in placements for block in placement.blocks]

    def _place(self, call: ScheduledCall, encoding: Encoding, span: ParentPlan) -> _Placement:
        assert call.plan is not None
        (blocks,) = self.call_table.blocks.of_span(encoding, span)
        # The one place at which the query needs no rotation.
        wanted = span.offset - span.start - (call.plan.new_offset - call.plan.own_position)
        delta = wanted - encoding.stored_position
        if delta == 0 or not self.call_table.store.is_settled(encoding):
            # Not settled: its keys are written in the step that is being planned, and moves come
            # before a step. The query turns instead, this once.
            return _Placement(encoding, blocks, encoding.stored_position)
        alone = all(block.ref_cnt == 1 for block in encoding.held_blocks)
        if alone and not encoding.num_readers and call.parents.count(encoding) == 1:
            return _Placement(encoding, blocks, wanted, delta)
        if self.pool.get_num_free_blocks() < len(blocks):
            return _Placement(encoding, blocks, encoding.stored_position)
        return _Placement(encoding, self.pool.get_new_blocks(len(blocks)), wanted, delta, True)

    def commit(self, call: ScheduledCall) -> None:
        """Have the moves of a call that starts happen before this step."""
        assert call.plan is not None
        placements = self._placed.pop(call)
        for placement, span in zip(placements, call.plan.parents, strict=True):
            encoding = placement.encoding
            if placement.is_copy:
                (sources,) = self.call_table.blocks.of_span(encoding, span)
            elif placement.delta:
                (sources,) = encoding.blocks
                placement.blocks = sources
                self.call_table.store.residency.move(encoding, placement.stored_position)
            else:
                continue
            self._moves += [
                BlockMove(src.block_id, dst.block_id, placement.delta)
                for src, dst in zip(sources, placement.blocks, strict=True)
            ]
        call.stored_positions = [placement.stored_position for placement in placements]
        self._release_copies(placements)

    def withdraw_copies(self, call: ScheduledCall) -> list[Block]:
        """Let a call that lacks room read the parents that were to be copied where they lie.

        Returns:
            The parents' blocks now; an empty list if nothing was to be copied.
        """
        placements = self._placed.get(call, [])
        if not any(placement.is_copy for placement in placements):
            return []
        assert call.plan is not None
        self._release_copies(placements)
        for placement, span in zip(placements, call.plan.parents, strict=True):
            if placement.is_copy:
                (placement.blocks,) = self.call_table.blocks.of_span(placement.encoding, span)
                placement.stored_position = placement.encoding.stored_position
                placement.delta, placement.is_copy = 0, False
        return [block for placement in placements for block in placement.blocks]

    def withdraw(self, call: ScheduledCall) -> None:
        """Undo `place` for a call that could not start."""
        self._release_copies(self._placed.pop(call, []))

    def withdraw_all(self) -> None:
        """Undo `place`, at the end of planning, for all calls that did not start."""
        for call in list(self._placed):
            self.withdraw(call)

    def _release_copies(self, placements: list[_Placement]) -> None:
        """Free the blocks of copies; a call that started holds its own references by now."""
        for placement in placements:
            if placement.is_copy:
                self.pool.free_blocks(reversed(placement.blocks))

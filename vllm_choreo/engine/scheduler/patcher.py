# SPDX-License-Identifier: Apache-2.0
"""Blocks of patches: whole ones are shared or copied, then runs are written over the copies."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.stager import Stager
from vllm_choreo.repair.runs import TokenRanges
from vllm_choreo.store.encoding import Encoding


class Patcher:
    """Allocation of the blocks of patches.

    Attributes:
        stager: writer of patches by layers.
    """

    def __init__(self, call_table: CallTable, pool: BlockPool) -> None:
        self._call_table = call_table
        self._pool = pool
        self._block_size = call_table.block_size
        self.stager = Stager(call_table, pool)

    def num_blocks(self, encoding: Encoding) -> int:
        """Number of free blocks that placing the patch takes."""
        return len(self._private(encoding))

    def place(self, encoding: Encoding) -> None:
        """Put a patch, whose source is resident, over shared blocks and new ones.

        A block is new where a run touches it, and a copy where the run leaves tokens of it, or
        layers. What has its place by layers is written before the step being planned. Keys
        that were moved to positions which the model does not know are copied, all of them.
        """
        patch, store = encoding.patch, self._call_table.store
        assert patch is not None
        (sources,), position = patch.source.blocks, self._position(encoding)
        blocks = list(sources)
        private = self._private(encoding)
        new = self._pool.get_new_blocks(len(private))
        for index, block in zip(private, new, strict=True):
            blocks[index] = block
        store.residency.patch(encoding, [blocks], position, store.step)
        self._pool.free_blocks(new)  # the store has its own
        for index, block in zip(private, new, strict=True):
            if patch.layers or not self._is_overwritten(index, encoding.num_tokens, patch.runs):
                delta = position - patch.source.stored_position
                store.residency.block_copies.move(sources[index], block, delta)
        if patch.layers:
            self.stager.add(encoding)
        store.settle(patch.source)

    def _private(self, encoding: Encoding) -> list[int]:
        """Indices of the blocks that the patch does not share with its source."""
        patch = encoding.patch
        assert patch is not None
        if self._position(encoding) != patch.source.stored_position:
            return list(range(patch.source.num_blocks))
        size = self._block_size
        touched = {n for start, stop in patch.runs for n in range(start // size, -(-stop // size))}
        return sorted(touched)

    def _position(self, encoding: Encoding) -> int:
        """Stored position of token 0: the source's, or 0 if the model does not know it."""
        assert encoding.patch is not None
        position = encoding.patch.source.stored_position
        is_known = 0 <= position <= self._call_table.max_model_len - encoding.num_tokens
        return position if is_known else 0

    def _is_overwritten(self, index: int, num_tokens: int, runs: TokenRanges) -> bool:
        """Return whether one run has all tokens of a block."""
        first, last = index * self._block_size, min((index + 1) * self._block_size, num_tokens)
        return any(start <= first and last <= stop for start, stop in runs)

# SPDX-License-Identifier: Apache-2.0
"""Blocks of patches: whole ones are shared or copied, then runs are written over the copies."""

from __future__ import annotations

from collections.abc import Container, Sequence

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.stager import Stager
from vllm_choreo.repair.runs import TokenRanges
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import BlockIndices


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
        return sum(map(len, self._private(encoding)))

    def is_served_by(self, encoding: Encoding, there: Sequence[Container[int]]) -> bool:
        """Return whether a patch finds, in its source, all that it leaves as it is.

        That is what it keeps, or all of it if it is kept whole, and what its runs see.

        Args:
            there: indices of the blocks of the source that are there, by group.
        """
        patch = encoding.patch
        assert patch is not None
        return all(
            patch.layers is None and self._is_overwritten(index, encoding.num_tokens, patch.runs)
            for of_group, needed in zip(there, self._needed(encoding), strict=True)
            for index in needed
            if index not in of_group
        )

    def place(self, encoding: Encoding) -> None:
        """Put a patch, whose source is resident, over shared blocks and new ones.

        A block is new where a run touches it, and a copy where the run leaves tokens of it, or
        layers. What has its place by layers is written before the step being planned. Keys
        that were moved to positions which the model does not know are copied, all of them.
        """
        patch, store = encoding.patch, self._call_table.store
        assert patch is not None
        sources, position = patch.source.blocks, self._position(encoding)
        table = [list(of_group) for of_group in sources]
        private = [(g, index) for g, held in enumerate(self._private(encoding)) for index in held]
        new = self._pool.get_new_blocks(len(private))
        for (group, index), block in zip(private, new, strict=True):
            table[group][index] = block
        store.residency.patch(encoding, table, position, store.step)
        self._pool.free_blocks(new)  # the store has its own
        for (group, index), block in zip(private, new, strict=True):
            if patch.layers or not self._is_overwritten(index, encoding.num_tokens, patch.runs):
                delta = position - patch.source.stored_position
                store.residency.block_copies.move(sources[group][index], block, delta, group)
        if patch.layers:
            self.stager.add(encoding)
        store.settle(patch.source)

    def _private(self, encoding: Encoding) -> BlockIndices:
        """Indices, by group, of the blocks that the patch does not share with its source."""
        patch, size = encoding.patch, self._block_size
        assert patch is not None
        touched = {n for start, stop in patch.runs for n in range(start // size, -(-stop // size))}
        if self._position(encoding) == patch.source.stored_position:
            return [sorted(touched)] * len(self._call_table.store.groups.windows)
        return [
            [index for index, block in enumerate(of_group) if index in touched or not block.is_null]
            for of_group in patch.source.blocks
        ]

    def _needed(self, encoding: Encoding) -> BlockIndices:
        """Blocks of a patch, by group, that it keeps, and that its runs see."""
        patch, groups = encoding.patch, self._call_table.store.groups
        assert patch is not None
        end = -(-encoding.num_tokens // self._block_size)
        if encoding.is_kept_whole or not groups.has_windows:
            return [range(end)] * len(groups.windows)
        needed = [set(held) for held in groups.held(encoding.num_tokens)]
        for start, stop in patch.runs:
            seen = groups.read_by_run((patch.start, stop), stop - start)
            for of_group, chosen in zip(needed, seen, strict=True):
                of_group.update(chosen)
        return [sorted(of_group) for of_group in needed]

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

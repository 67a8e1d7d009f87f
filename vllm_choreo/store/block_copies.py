# SPDX-License-Identifier: Apache-2.0
"""Copies of whole blocks that the next step begins with, and what belongs to them until then.

A step does them before it runs, in this order, and writes nothing itself before they are done:

    saves    KV cache blocks  ->  host blocks        (what is evicted)
    loads    host blocks      ->  KV cache blocks    (what is read again)
    moves    KV cache blocks  ->  KV cache blocks    (what a patch leaves as it is)

They are queued while a step is planned, and between steps, when a client evicts. Blocks that they
name are reserved for them until the step that does them is planned:

- the *source of a save* may be given to whoever the planned step serves, for that writes later. A
  message that is loaded is written between steps, at once: so between plannings sources are held;
- the *target of a load or move* may lose the encoding for which it was meant, to a younger call of
  the same planning. The block then is somebody else's, and the copy must not be made;
- the *host blocks of a save* may be given up before it is done. It must not be done then.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_choreo.memory_changes import BlockMove


class Block(Protocol):
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int

    @property
    def is_null(self) -> bool: ...


class BlockPool(Protocol):
    """Methods of vLLM's block pool that copies need.

    Attributes:
        null_block: block that stands in gaps, and is never free.
    """

    @property
    def null_block(self) -> Block: ...

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


@dataclass(frozen=True)
class PlannedCopies:
    """Copies of a step that was planned, by the numbers of blocks.

    Attributes:
        saves: (KV cache block, host block) each.
        loads: (host block, KV cache block) each.
        moves: blocks whose keys are turned into other blocks.
    """

    saves: tuple[tuple[int, int], ...]
    loads: tuple[tuple[int, int], ...]
    moves: tuple[BlockMove, ...]


class BlockCopies:
    """Queued copies of blocks, and the references on blocks that they hold.

    Args:
        pool: vLLM's block pool.

    Attributes:
        is_planning: whether a step is planned now; otherwise the last one has been sent.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.is_planning = False
        self._saves: dict[int, Block] = {}  # by host block, the source
        self._loads: dict[int, int] = {}  # by target's number, the host block
        # By target's number: source, delta and group.
        self._moves: dict[int, tuple[Block, int, int]] = {}

    def begin(self) -> None:
        """Begin to plan a step: sources of saves may be given away from now on."""
        assert not self.is_planning
        self._pool.free_blocks([*self._saves.values()])
        self.is_planning = True

    def take(self) -> PlannedCopies:
        """End the planning; return the step's copies, which hold no block any more."""
        assert self.is_planning
        planned = PlannedCopies(
            tuple((source.block_id, host_block) for host_block, source in self._saves.items()),
            tuple((host_block, target) for target, host_block in self._loads.items()),
            tuple(
                BlockMove(source.block_id, target, delta, group)
                for target, (source, delta, group) in self._moves.items()
            ),
        )
        self._pool.free_blocks([source for source, *_ in self._moves.values()])
        self._saves, self._loads, self._moves = {}, {}, {}
        self.is_planning = False
        return planned

    def save(self, sources: Sequence[Block], host_blocks: Sequence[int]) -> None:
        """Queue copies out of the KV cache."""
        if not self.is_planning:
            self._pool.touch(sources)
        for source, host_block in zip(sources, host_blocks, strict=True):
            assert host_block not in self._saves, "a host block has one owner"
            self._saves[host_block] = source

    def load(self, host_blocks: Sequence[int], targets: Sequence[Block]) -> None:
        """Queue copies of host blocks, saved or about to be, into the KV cache.

        Targets must be held before: freeing them withdraws the copies.
        """
        assert self.is_planning, "nobody reads between steps"
        for host_block, target in zip(host_blocks, targets, strict=True):
            assert target.ref_cnt and target.block_id not in self._moves
            self._loads[target.block_id] = host_block

    def move(self, source: Block, target: Block, delta: int, group: int = 0) -> None:
        """Queue a copy of a block, its keys turned by `delta` positions, into one that is held.

        Args:
            group: KV cache group of both.
        """
        assert self.is_planning, "nobody reads between steps"
        assert target.ref_cnt and target.block_id not in {*self._loads, *self._moves}
        self._pool.touch([source])
        self._moves[target.block_id] = source, delta, group

    def free_host_blocks(self, host_blocks: Iterable[int]) -> None:
        """Withdraw saves into host blocks that are given up."""
        sources = [self._saves.pop(block) for block in host_blocks if block in self._saves]
        if not self.is_planning:
            self._pool.free_blocks(sources)

    def on_freed(self, blocks: Iterable[Block]) -> None:
        """Withdraw loads and moves into blocks that nobody holds any more.

        The source of a move is one of them once nothing else held it: what was to be copied there
        first is withdrawn, too.
        """
        freed = [*blocks]
        while freed:
            block = freed.pop()
            if not block.ref_cnt:
                self._loads.pop(block.block_id, None)
                if move := self._moves.pop(block.block_id, None):
                    source, *_ = move
                    self._pool.free_blocks([source])
                    freed.append(source)

# SPDX-License-Identifier: Apache-2.0
"""Memory outside the KV cache for evicted encodings: what lies there, and what is to be copied.

vLLM's own offloading is keyed by the hashes of prefixes, which encodings do not have; and one
comes back at another place of another block table. So whole blocks are copied out and in:

    evict:  KV cache blocks  --save-->  host blocks          (the copy stays until it is pushed out)
    read:   host blocks      --load-->  new KV cache blocks  (instead of encoding again)

This module knows what lies where; the copying is queued in `block_copies.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_choreo.store.block_copies import Block, BlockCopies
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import BlockIndices, Blocks


@dataclass(frozen=True)
class HostCopy:
    """Copy of an encoding in host memory.

    Attributes:
        blocks: for each KV cache group the host blocks of its tokens, in their order; None: a gap.
        num_encoded: number of its tokens.
        stored_position: position to which the first key is rotated there.
    """

    blocks: tuple[tuple[int | None, ...], ...]
    num_encoded: int
    stored_position: int

    @property
    def host_blocks(self) -> list[int]:
        """Host blocks that it takes, group by group."""
        return [block for of_group in self.blocks for block in of_group if block is not None]

    def has_all_of(self, blocks: Blocks) -> bool:
        """Return whether it has every block that lies in `blocks`, which have gaps, too."""
        return all(
            block.is_null or (index < len(mine) and mine[index] is not None)
            for mine, of_group in zip(self.blocks, blocks, strict=True)
            for index, block in enumerate(of_group)
        )


class HostTier:
    """Encodings that lie in host memory; the least recently used make room for others.

    Args:
        num_blocks: blocks of the host's memory, each as large as one of the KV cache.
        copies: the queue of copies of blocks.
        blocks_of: tells what is saved of an encoding: its blocks, by group, or its state as the
            one block of another pool.
    """

    def __init__(
        self,
        num_blocks: int,
        copies: BlockCopies,
        blocks_of: Callable[[Encoding], Blocks] = lambda encoding: encoding.blocks,
    ) -> None:
        self.num_blocks = num_blocks
        self._copies = copies
        self._blocks_of = blocks_of
        self._free = list(range(num_blocks))
        self._saved: OrderedDict[Encoding, HostCopy] = OrderedDict()
        self._protected: set[Encoding] = set()
        self._filling: set[Encoding] = set()  # from elsewhere, over several steps

    def __contains__(self, encoding: Encoding) -> bool:
        return encoding in self._saved

    @property
    def num_used(self) -> int:
        """Blocks that hold encodings."""
        return self.num_blocks - len(self._free)

    def num_blocks_of(self, encoding: Encoding) -> int:
        """Blocks that a copy of an encoding takes; 0: there is none."""
        return len(self._saved[encoding].host_blocks) if encoding in self._saved else 0

    def save(self, encoding: Encoding) -> None:
        """Copy the blocks of an encoding out, if it fits and does not lie there already.

        Encodings that are loaded in the same step stay: saves come first, and would overwrite them.
        """
        saved, blocks = self._saved.get(encoding), self._blocks_of(encoding)
        is_there = saved is not None and saved.num_encoded >= encoding.num_encoded
        if saved is not None and is_there and saved.has_all_of(blocks):
            self._saved.move_to_end(encoding)
            return
        self.discard(encoding)
        sources = [block for of_group in blocks for block in of_group if not block.is_null]
        need = len(sources)
        staying = self._protected | self._filling
        if need > self.num_blocks - sum(len(self._saved[e].host_blocks) for e in staying):
            return
        while len(self._free) < need:
            self.discard(next(other for other in self._saved if other not in staying))
        held = [[not block.is_null for block in of_group] for of_group in blocks]
        copy = self._add(encoding, held, encoding.num_encoded, encoding.stored_position)
        self._copies.save(sources, copy.host_blocks)

    def reserve(
        self, encoding: Encoding, held: Sequence[range], num_encoded: int, stored_position: int
    ) -> HostCopy | None:
        """Reserve free blocks, which somebody else fills with an encoding; None: there are too few.

        It stays there, whatever makes room, until `on_filled` is called, or `discard`.

        Args:
            held: indices of the blocks of each group, before which there are gaps.
        """
        if sum(map(len, held)) > len(self._free):
            return None
        self._filling.add(encoding)
        is_held = [[index in chosen for index in range(chosen.stop)] for chosen in held]
        return self._add(encoding, is_held, num_encoded, stored_position)

    def _add(
        self,
        encoding: Encoding,
        is_held: Sequence[Sequence[bool]],
        num_encoded: int,
        stored_position: int,
    ) -> HostCopy:
        """Give an encoding free host blocks wherever one of its blocks is held."""
        blocks = tuple(
            tuple(self._free.pop() if is_there else None for is_there in of_group)
            for of_group in is_held
        )
        self._saved[encoding] = HostCopy(blocks, num_encoded, stored_position)
        return self._saved[encoding]

    def on_filled(self, encoding: Encoding) -> None:
        """Note that reserved blocks hold their encoding; from now on it makes room like others."""
        self._filling.discard(encoding)

    def restorable(self, encoding: Encoding) -> list[tuple[int, int]]:
        """Group and index of each block that a saved encoding lacks, and that can be loaded.

        All of its blocks, unless it is resident with gaps: then those that lie in gaps.
        """
        saved = self._saved[encoding]
        if encoding.is_resident and encoding.stored_position != saved.stored_position:
            return []
        return [
            (group, index)
            for group, of_group in enumerate(saved.blocks)
            for index, block in enumerate(of_group)
            if block is not None
            and not (encoding.is_resident and not encoding.blocks[group][index].is_null)
        ]

    def completes(self, encoding: Encoding, wanted: BlockIndices | None) -> bool:
        """Return whether an encoding has certain blocks of each group once it is loaded.

        Args:
            wanted: None: any will do.
        """
        if encoding not in self._saved:
            return False
        loaded = set(self.restorable(encoding))
        return bool(loaded) and all(
            (group, index) in loaded
            or (encoding.is_resident and not encoding.blocks[group][index].is_null)
            for group, chosen in enumerate(wanted or ())
            for index in chosen
        )

    def protect(self, encoding: Encoding) -> None:
        """Protect a saved encoding that the step being planned loads: no save displaces it."""
        self._saved.move_to_end(encoding)
        self._protected.add(encoding)

    def find(self, encoding: Encoding) -> HostCopy:
        """Copy of a saved encoding."""
        return self._saved[encoding]

    def load(
        self, encoding: Encoding, places: Sequence[tuple[int, int]], blocks: Sequence[Block]
    ) -> None:
        """Copy blocks of a saved encoding into `blocks`, which it holds already.

        Args:
            places: group and index of each.
        """
        self.protect(encoding)
        saved = self._saved[encoding]
        found = (saved.blocks[group][index] for group, index in places)
        self._copies.load([block for block in found if block is not None], blocks)

    def discard(self, encoding: Encoding) -> None:
        """Forget an encoding, if it lies there."""
        self._protected.discard(encoding)
        self._filling.discard(encoding)
        saved = self._saved.pop(encoding, None)
        if saved is not None:
            host_blocks = saved.host_blocks
            self._copies.free_host_blocks(host_blocks)
            self._free += host_blocks

    def clear(self) -> None:
        """Forget all encodings but those being filled, whose blocks must not be given to others."""
        for encoding in self._saved.keys() - self._filling:
            self.discard(encoding)

    def on_planned(self) -> None:
        """Let encodings make room again that were protected for the step that is planned now."""
        self._protected.clear()

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


@dataclass(frozen=True)
class _Saved:
    """Host blocks of an encoding, and the position to which its first key is rotated there."""

    host_blocks: list[int]
    num_encoded: int
    stored_position: int


class HostTier:
    """Encodings that lie in host memory; the least recently used make room for others.

    Args:
        num_blocks: blocks of the host's memory, each as large as one of the KV cache.
        copies: the queue of copies of blocks.
        blocks_of: tells what is saved of an encoding: its blocks, or its state as the one block of
            another pool.
    """

    def __init__(
        self,
        num_blocks: int,
        copies: BlockCopies,
        blocks_of: Callable[[Encoding], Sequence[Block]] = lambda encoding: encoding.held_blocks,
    ) -> None:
        self.num_blocks = num_blocks
        self._copies = copies
        self._blocks_of = blocks_of
        self._free = list(range(num_blocks))
        self._saved: OrderedDict[Encoding, _Saved] = OrderedDict()
        self._protected: set[Encoding] = set()
        self._filling: set[Encoding] = set()  # from elsewhere, over several steps

    def __contains__(self, encoding: Encoding) -> bool:
        return encoding in self._saved

    @property
    def num_used(self) -> int:
        """Blocks that hold encodings."""
        return self.num_blocks - len(self._free)

    def save(self, encoding: Encoding) -> None:
        """Copy the blocks of an encoding out, if it fits and does not lie there already.

        Encodings that are loaded in the same step stay: saves come first, and would overwrite them.
        """
        saved = self._saved.get(encoding)
        if saved is not None and saved.num_encoded >= encoding.num_encoded:
            self._saved.move_to_end(encoding)
            return
        self.discard(encoding)
        blocks = self._blocks_of(encoding)
        need = len(blocks)
        staying = self._protected | self._filling
        if need > self.num_blocks - sum(map(self.num_blocks_of, staying)):
            return
        while len(self._free) < need:
            self.discard(next(other for other in self._saved if other not in staying))
        host_blocks = [self._free.pop() for _ in range(need)]
        self._saved[encoding] = _Saved(host_blocks, encoding.num_encoded, encoding.stored_position)
        self._copies.save(blocks, host_blocks)

    def reserve(
        self, encoding: Encoding, num_blocks: int, num_encoded: int, stored_position: int
    ) -> list[int] | None:
        """Reserve free blocks, which somebody else fills with an encoding; None: there are too few.

        It stays there, whatever makes room, until `on_filled` is called, or `discard`.
        """
        if num_blocks > len(self._free):
            return None
        host_blocks = [self._free.pop() for _ in range(num_blocks)]
        self._saved[encoding] = _Saved(host_blocks, num_encoded, stored_position)
        self._filling.add(encoding)
        return host_blocks

    def on_filled(self, encoding: Encoding) -> None:
        """Note that reserved blocks hold their encoding; from now on it makes room like others."""
        self._filling.discard(encoding)

    def num_blocks_of(self, encoding: Encoding) -> int:
        """KV cache blocks that it takes to load an encoding."""
        return len(self._saved[encoding].host_blocks)

    def protect(self, encoding: Encoding) -> None:
        """Protect a saved encoding that the step being planned loads: no save displaces it."""
        self._saved.move_to_end(encoding)
        self._protected.add(encoding)

    def place_of(self, encoding: Encoding) -> tuple[int, int]:
        """Stored position of a saved encoding, and the number of its tokens."""
        saved = self._saved[encoding]
        return saved.stored_position, saved.num_encoded

    def load(self, encoding: Encoding, blocks: Sequence[Block]) -> None:
        """Copy a saved encoding into `blocks`, which it holds already."""
        self.protect(encoding)
        self._copies.load(self._saved[encoding].host_blocks, blocks)

    def discard(self, encoding: Encoding) -> None:
        """Forget an encoding, if it lies there."""
        self._protected.discard(encoding)
        self._filling.discard(encoding)
        saved = self._saved.pop(encoding, None)
        if saved is not None:
            self._copies.free_host_blocks(saved.host_blocks)
            self._free += saved.host_blocks

    def clear(self) -> None:
        """Forget all encodings but those being filled, whose blocks must not be given to others."""
        for encoding in self._saved.keys() - self._filling:
            self.discard(encoding)

    def on_planned(self) -> None:
        """Let encodings make room again that were protected for the step that is planned now."""
        self._protected.clear()

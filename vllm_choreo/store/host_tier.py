# SPDX-License-Identifier: Apache-2.0
"""Memory outside the KV cache for evicted messages: what lies there, and what is to be copied.

vLLM's own offloading is keyed by the hashes of prefixes, which messages do not have; and a message
comes back at another place of another block table. So whole blocks are copied out and in:

    evict:  KV cache blocks  --save-->  host blocks          (the copy stays until it is pushed out)
    read:   host blocks      --load-->  new KV cache blocks  (instead of encoding again)

The copies of a step are done before it runs: all saves, then all loads. A block that is saved and
given to another request in one step is thus read before it is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.store.store import Message


@dataclass(frozen=True)
class _Saved:
    """Where a message lies, and the position to which its first key is rotated there."""

    host_blocks: list[int]
    num_encoded: int
    stored_position: int


class HostTier:
    """Which messages lie in host memory; the least recently used make room for others.

    Args:
        num_blocks: of the host's memory, each as large as one of the KV cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._saved: OrderedDict[Message, _Saved] = OrderedDict()
        self._kept: set[Message] = set()
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []

    def __contains__(self, message: Message) -> bool:
        return message in self._saved

    @property
    def num_used(self) -> int:
        """Blocks that hold messages."""
        return self.num_blocks - len(self._free)

    def save(self, message: Message) -> None:
        """Copy the blocks of a message out, if it fits and does not lie there already.

        Those that are loaded in the same step stay: saves come first, and would overwrite them.
        """
        saved = self._saved.get(message)
        if saved is not None and saved.num_encoded >= message.num_encoded:
            self._saved.move_to_end(message)
            return
        self.discard(message)
        need = len(message.blocks)
        if need > self.num_blocks - sum(map(self.num_blocks_of, self._kept)):
            return
        while len(self._free) < need:
            self.discard(next(other for other in self._saved if other not in self._kept))
        host_blocks = [self._free.pop() for _ in range(need)]
        self._saved[message] = _Saved(host_blocks, message.num_encoded, message.stored_position)
        sources = [block.block_id for block in message.blocks]
        self._saves += zip(sources, host_blocks, strict=True)

    def num_blocks_of(self, message: Message) -> int:
        """KV cache blocks that it takes to load a message."""
        return len(self._saved[message].host_blocks)

    def keep(self, message: Message) -> None:
        """A saved message is to be loaded in the step being planned: no save displaces it."""
        self._saved.move_to_end(message)
        self._kept.add(message)

    def load(self, message: Message, blocks: Sequence[Any]) -> tuple[int, int]:
        """Copy a saved message into `blocks`; returns its stored position and its tokens."""
        self.keep(message)
        saved = self._saved[message]
        targets = [block.block_id for block in blocks]
        self._loads += zip(saved.host_blocks, targets, strict=True)
        return saved.stored_position, saved.num_encoded

    def discard(self, message: Message) -> None:
        """Forget a message, if it lies there."""
        self._kept.discard(message)
        saved = self._saved.pop(message, None)
        if saved is not None:
            self._free += saved.host_blocks

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies to do before the step that is being planned: saves, and loads."""
        saves, loads = self._saves, self._loads
        self._saves, self._loads = [], []
        self._kept.clear()
        return saves, loads

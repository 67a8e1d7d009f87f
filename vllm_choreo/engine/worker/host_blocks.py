# SPDX-License-Identifier: Apache-2.0
"""A worker's share of the host tier: copies of KV cache blocks, and the copying."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch


class HostBlocks:
    """Copies of blocks of every layer, in memory of the host.

    With a GPU the copies run in the order of its other work, and nothing waits for them.

    Args:
        kv_caches: one per layer, `[num_blocks, ...]`, any dtype, strides and device; layers of
            several KV cache groups lie over one another, and are copied together.
        num_blocks: blocks of zeros in host memory, which is taken from the system when it is first
            written; with a GPU, which copies from and to pinned memory, at once.

    Attributes:
        copies: one per layer; those of layers that lie over one another are the same.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        apart = {cache.data_ptr(): cache for cache in kv_caches}
        copies = {place: _zeros_like(cache, num_blocks) for place, cache in apart.items()}
        self.copies = [copies[cache.data_ptr()] for cache in kv_caches]
        self._pairs = [(cache, copies[place]) for place, cache in apart.items()]

    def copy(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy blocks out, then in.

        Args:
            saves: pairs (block of the KV cache, block of the host).
            loads: pairs (block of the host, block of the KV cache); of several into one block the
                last one counts.
        """
        for cache, copies in self._pairs:
            for block, host_block in saves:
                copies[host_block].copy_(cache[block], non_blocking=True)
            for host_block, block in loads:
                cache[block].copy_(copies[host_block], non_blocking=True)


def _zeros_like(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks like those of a cache, whose dims lie in the same order: each is copied as one run.

    Zeros, since whole blocks are copied: slots that hold no token are read with a weight of 0, and
    0 times what happens to lie in memory need not be 0.
    """
    order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    shape = (num_blocks, *(cache.shape[dim] for dim in order))
    if cache.is_cuda:
        copies = torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
    else:
        size = prod(shape) * cache.element_size()
        copies = torch.from_numpy(np.zeros(size, np.uint8)).view(cache.dtype).view(shape)
    return copies.permute(0, *(1 + order.index(dim) for dim in range(1, cache.dim())))

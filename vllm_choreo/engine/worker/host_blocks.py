# SPDX-License-Identifier: Apache-2.0
"""A worker's share of the host tier: copies of KV cache blocks, and the copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch

from vllm_choreo.engine.worker.tensors import to_device

# Bytes of blocks that are gathered on a GPU at a time: what a step takes there is free meanwhile.
_STAGED_BYTES = 32 * 2**20


class HostBlocks:
    """Copies of blocks of every layer, in memory of the host.

    With a GPU the copies run in the order of its other work, and nothing waits for them. Blocks are
    gathered there, so that those which lie side by side in host memory are one copy: 63 blocks of
    32 layers would be 2,016.

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
        # Dims of both in the order in which they lie in memory: each block is copied as one run.
        self._pairs = []
        copies = {}
        for place, cache in apart.items():
            order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
            lies = cache.permute(0, *order)
            kept = _zeros_like(lies, num_blocks)
            self._pairs.append((lies, kept))
            copies[place] = kept.permute(0, *(1 + order.index(d) for d in range(1, cache.dim())))
        self.copies = [copies[cache.data_ptr()] for cache in kv_caches]

    def copy(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy blocks out, then in.

        Args:
            saves: pairs (block of the KV cache, block of the host).
            loads: pairs (block of the host, block of the KV cache); of several into one block the
                last one counts.
        """
        last = {block: host_block for host_block, block in loads}
        if not self._pairs or not self._pairs[0][0].is_cuda:
            self._copy_each(saves, last.items())
            return
        self._copy_gathered(saves, is_load=False)
        self._copy_gathered(last.items(), is_load=True)

    def _copy_each(
        self, saves: Iterable[tuple[int, int]], loads: Iterable[tuple[int, int]]
    ) -> None:
        """Copy block by block; both are pairs (block of the KV cache, block of the host)."""
        for cache, copies in self._pairs:
            for block, host_block in saves:
                copies[host_block].copy_(cache[block])
            for block, host_block in loads:
                cache[block].copy_(copies[host_block])

    def _copy_gathered(self, pairs: Iterable[tuple[int, int]], *, is_load: bool) -> None:
        """Copy runs of blocks that lie side by side in host memory, between it and a gathering.

        Args:
            pairs: pairs (block of the KV cache, block of the host).
        """
        ordered = sorted(pairs, key=lambda pair: pair[1])
        if not ordered:
            return
        blocks, host_blocks = zip(*ordered, strict=True)
        all_ids = to_device(torch.tensor(blocks), self._pairs[0][0].device)
        for cache, copies in self._pairs:
            most = max(1, _STAGED_BYTES // (cache[0].numel() * cache.element_size()))
            for begin in range(0, len(ordered), most):
                ids = all_ids[begin : begin + most]
                size = (len(ids), *cache.shape[1:])
                staged = cache.new_empty(size) if is_load else cache.index_select(0, ids)
                for first, stop, host_block in _runs(host_blocks[begin : begin + most]):
                    here, there = staged[first:stop], copies[host_block:][: stop - first]
                    if is_load:
                        here.copy_(there, non_blocking=True)
                    else:
                        there.copy_(here, non_blocking=True)
                if is_load:
                    cache.index_copy_(0, ids, staged)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where runs of consecutive numbers begin and end, and the first number of each."""
    begins = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    for first, stop in pairwise([0, *begins, len(numbers)]):
        yield first, stop, numbers[first]


def _zeros_like(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks like those of a cache, contiguous.

    Zeros, since whole blocks are copied: slots that hold no token are read with a weight of 0, and
    0 times what happens to lie in memory need not be 0.
    """
    shape = (num_blocks, *cache.shape[1:])
    if cache.is_cuda:
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
    size = prod(shape) * cache.element_size()
    return torch.from_numpy(np.zeros(size, np.uint8)).view(cache.dtype).view(shape)

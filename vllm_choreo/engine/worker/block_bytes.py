# SPDX-License-Identifier: Apache-2.0
"""A worker's share of keys and values that are saved and loaded: bytes of blocks.

The bytes are those of a chunk of `snapshot/tensors.py`: parts one after the other, each
`[num_tokens, num_kv_heads, size]`. A worker reads the heads that it has; it is handed all.
Layers of a KV cache group lie in blocks of their own; -1 stands for a gap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from vllm_choreo.ops import QuantizedKV
from vllm_choreo.ops.layout import Layout, key_view, value_view

if TYPE_CHECKING:
    import numpy as np

    _Bits: TypeAlias = torch.Tensor | np.ndarray

Parts = tuple[int, int]
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16


class BlockBytes:
    """Reader and writer of the bytes of KV cache blocks.

    Args:
        caches: one per layer, `[num_blocks, num_kv_heads, block_size, ...]`: the KV cache, or the
            copies in host memory.
        layout: layout of all caches.
        rank, num_ranks: the worker's number, and the number of workers that share the heads.
        quantized: meaning of the bytes of each layer's cache; empty if they hold numbers.
        value_size: numbers of a value in latent caches; keys are what is behind it.
        groups: KV cache group of each layer; None: there is one.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        layout: Layout,
        rank: int = 0,
        num_ranks: int = 1,
        quantized: Sequence[QuantizedKV] = (),
        value_size: int | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        self._caches = caches
        self._groups = groups or [0] * len(caches)
        self._quantized = quantized
        self._layout = layout
        self._rank, self._num_ranks = rank, num_ranks
        self._value_size = value_size

    def shape(self) -> dict[str, Any]:
        """Bytes of a token: `dtype`, `layers`, `groups` and `scales`.

        `groups` are the KV cache groups of the layers, `layers` the `[num_kv_heads, key_size,
        value_size]` of each in this worker, and `scales` the `[key_scale, value_scale]` of each if
        the cache is in 8 bits, else none.
        """
        parts = range(0, 2 * len(self._caches), 2)
        sizes = [
            [self._part(part).shape[1], *(self._part(p).shape[3] for p in (part, part + 1))]
            for part in parts
        ]
        scales = [[q.key_scale, q.value_scale] for q in self._quantized]
        dtype = self._quantized[0].dtype if self._quantized else self._caches[0].dtype
        name = str(dtype).removeprefix("torch.")
        return {"dtype": name, "layers": sizes, "groups": list(self._groups), "scales": scales}

    def read(self, blocks: Sequence[Sequence[int]], parts: Parts, start: int, stop: int) -> bytes:
        """Read tokens `start … stop-1` in `blocks`, of the parts `first … last-1`.

        Args:
            blocks: blocks of each KV cache group; none of these tokens lies in a gap.
            parts: `(first, last)`; part `2 * i` is the keys of layer `i`, `2 * i + 1` its values.
        """
        tokens = torch.arange(start, stop)
        return b"".join(
            bytes_of(_indexable(self._part(part))[self._where(blocks, part, tokens)])
            for part in range(*parts)
        )

    def write(
        self,
        data: bytes | memoryview,
        heads: Sequence[int],
        blocks: Sequence[Sequence[int]],
        parts: Parts,
        start: int,
        stop: int,
    ) -> None:
        """Put the bytes of a chunk where `read` finds them; those of gaps are left out.

        Args:
            data: bytes of all heads.
            heads: number of heads of each layer in all workers together.
        """
        rest = tensor_of(data)
        for part in range(*parts):
            target = self._part(part)
            shape = (stop - start, heads[part // 2], target.shape[3])
            size = prod(shape) * target.element_size()
            rows = self._own(rest[:size].view(target.dtype).view(shape), target)
            first = min(stop, max(start, self._first(blocks[self._groups[part // 2]])))
            where = self._where(blocks, part, torch.arange(first, stop))
            _indexable(target)[where] = _indexable(rows[first - start :].to(target.device))
            rest = rest[size:]

    def _part(self, part: int) -> torch.Tensor:
        """View `[num_blocks, num_kv_heads, block_size, size]` of a layer's keys or values."""
        cache = self._caches[part // 2]
        if part % 2:
            return value_view(cache, self._layout, self._value_size)
        keys = key_view(cache, self._layout)
        # The beginnings of keys in a latent cache are the values.
        return keys[..., self._value_size or 0 :]

    def _own(self, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Rows of the heads that this worker has."""
        first = self._rank * rows.shape[1] // self._num_ranks
        return rows[:, first : first + target.shape[1]]

    def _first(self, blocks: Sequence[int]) -> int:
        """First token behind the gaps in the blocks of a group."""
        num_gaps = next((index for index, block in enumerate(blocks) if block >= 0), len(blocks))
        return num_gaps * self._caches[0].shape[2]

    def _where(
        self, blocks: Sequence[Sequence[int]], part: int, tokens: torch.Tensor
    ) -> tuple[_Bits, slice, _Bits]:
        """Index of tokens in a part, which gives `[num_tokens, num_kv_heads, size]`."""
        cache = self._caches[part // 2]
        size = cache.shape[2]
        of_group = torch.tensor(blocks[self._groups[part // 2]])
        ids, offsets = of_group[tokens // size], tokens % size
        return _indexable(ids.to(cache.device)), slice(None), _indexable(offsets.to(cache.device))


def _indexable(tensor: torch.Tensor) -> _Bits:
    """Tensor as it is indexed and copied fastest: on the host as numpy's array of its bits.

    numpy copies with one thread, which is faster than the digest (`snapshot/streams.py`). More
    threads, such as torch's, would take the digest's core, and wait for one another.
    """
    return tensor.view(_DTYPES[tensor.element_size()]).numpy() if tensor.is_cpu else tensor


def bytes_of(rows: _Bits) -> bytes:
    """Bytes of a tensor or array, one row after the other."""
    if isinstance(rows, torch.Tensor):
        rows = rows.contiguous().view(torch.uint8).cpu().numpy()
    found: bytes = rows.tobytes()
    return found


def tensor_of(data: bytes | memoryview) -> torch.Tensor:
    """View of bytes as a uint8 tensor, not copied."""
    with warnings.catch_warnings():  # that they cannot be written: nobody does
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)

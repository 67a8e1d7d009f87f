# SPDX-License-Identifier: Apache-2.0
"""A worker's share of keys and values that are saved and loaded: bytes of blocks.

The bytes are those of a chunk of `keep/tensors.py`: parts one after the other, each
`[num_tokens, num_kv_heads, head_size]`. A worker reads the heads that it has; it is handed all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_choreo.ops.layout import Layout, read_kv, write_kv

Parts = tuple[int, int]


class KeptBlocks:
    """
    Args:
        caches: one per layer, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`: the KV
            cache, or the copies in host memory.
        layout: of all of them.
        rank, num_ranks: of the worker, among those that share the heads.
    """

    def __init__(
        self, caches: Sequence[torch.Tensor], layout: Layout, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._caches = caches
        self._layout = layout
        self._rank, self._num_ranks = rank, num_ranks

    def shape(self) -> dict[str, Any]:
        """`dtype`, and of each layer `[num_kv_heads, head_size]` that this worker has."""
        sizes = [[cache.shape[1], cache.shape[3] // 2] for cache in self._caches]
        return {"dtype": str(self._caches[0].dtype).removeprefix("torch."), "layers": sizes}

    def read(self, blocks: Sequence[int], parts: Parts, start: int, stop: int) -> bytes:
        """Tokens `start … stop-1` of what lies in `blocks`, of the parts `first … last-1`."""
        found = []
        for layer, wants_keys, wants_values in _layers(parts):
            cache = self._caches[layer]
            slots = _slots(blocks, start, stop, cache)
            keys, values = read_kv(cache, slots, self._layout)
            found += [keys] * wants_keys + [values] * wants_values
        rows = [_flat(tensor) for tensor in found]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).numpy().tobytes()

    def write(
        self,
        data: Any,
        heads: Sequence[int],
        blocks: Sequence[int],
        parts: Parts,
        start: int,
        stop: int,
    ) -> None:
        """Put the bytes of a chunk where `read` finds them.

        Args:
            data: bytes of all heads.
            heads: how many heads each layer has in all workers together.
        """
        rest = tensor_of(data)
        for layer, has_keys, has_values in _layers(parts):
            cache = self._caches[layer]
            slots = _slots(blocks, start, stop, cache)
            shape = (stop - start, heads[layer], cache.shape[3] // 2)
            halves: list[torch.Tensor | None] = []
            for is_there in (has_keys, has_values):
                size = is_there * shape[0] * shape[1] * shape[2] * cache.element_size()
                given, rest = rest[:size], rest[size:]
                halves.append(self._own(given, shape, cache) if is_there else None)
            _write(cache, slots, halves[0], halves[1], self._layout)

    def _own(
        self, given: torch.Tensor, shape: tuple[int, int, int], cache: torch.Tensor
    ) -> torch.Tensor:
        """The heads that this worker has, on its device."""
        first = self._rank * shape[1] // self._num_ranks
        rows = given.view(cache.dtype).view(shape)[:, first : first + cache.shape[1]]
        return rows.to(cache.device)


def _layers(parts: Parts) -> Iterator[tuple[int, bool, bool]]:
    """The layers of parts, and whether their keys and their values are among them."""
    first, last = parts
    for layer in range(first // 2, (last + 1) // 2):
        yield layer, first <= 2 * layer, 2 * layer + 1 < last


def _slots(blocks: Sequence[int], start: int, stop: int, cache: torch.Tensor) -> torch.Tensor:
    size = cache.shape[2]
    tokens = torch.arange(start, stop)
    slots = torch.tensor(blocks)[tokens // size] * size + tokens % size
    return slots.to(cache.device)


def _write(
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    layout: Layout,
) -> None:
    """Those of keys and values that are given; the others stay as they are."""
    if keys is None or values is None:
        old_keys, old_values = read_kv(cache, slots, layout)
        keys = old_keys if keys is None else keys
        values = old_values if values is None else values
    write_kv(cache, slots, keys, values, layout)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten().cpu()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The numbers of a tensor, one row after the other."""
    return _flat(tensor).numpy().tobytes()


def tensor_of(data: Any) -> torch.Tensor:
    """Bytes as uint8, not copied."""
    with warnings.catch_warnings():  # that they cannot be written: nobody does
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)

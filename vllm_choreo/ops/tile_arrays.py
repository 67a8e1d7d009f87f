# SPDX-License-Identifier: Apache-2.0
"""A plan of tiles in host memory, as it was cut, before it goes to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_choreo.ops.tiles import TileClass, Tiles

# Arrays lie at multiples of so many int32 numbers in the buffer that is sent, 16 bytes.
_ALIGNMENT = 4


class ClassArrays(NamedTuple):
    """Tiles of one size, see ``TileClass``: int64 arrays."""

    num_rows: int
    query: np.ndarray
    request: np.ndarray
    column: np.ndarray
    items: np.ndarray


class TileArrays(NamedTuple):
    """A plan, see ``Tiles``: int64 arrays.

    Attributes:
        classes: the tiles by size.
        common: all other arrays by name.
        num_partials: rows of partial results.
    """

    classes: Sequence[ClassArrays]
    common: Mapping[str, np.ndarray]
    num_partials: int

    def to(self, device: torch.device | str) -> Tiles:
        """Send the plan to a device, in one copy."""
        arrays = [*self.common.values(), *(a for one in self.classes for a in one[1:])]
        sizes = [padded(array.size) for array in arrays]
        host: np.ndarray = np.zeros(sum(sizes), dtype=np.int32)
        begin = 0
        for array, size in zip(arrays, sizes, strict=True):
            host[begin : begin + array.size] = array.ravel()
            begin += size
        parts = send(host, device).split(sizes)
        tensors = (
            part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )
        common = {name: next(tensors) for name in self.common}
        classes = tuple(
            TileClass(one.num_rows, *(next(tensors) for _ in range(4))) for one in self.classes
        )
        return Tiles(classes=classes, num_partials=self.num_partials, **common)


def padded(size: int) -> int:
    """Numbers that an array of this size takes up in a buffer."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def send(host: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy an array to a device, without waiting for what runs there."""
    tensor = torch.from_numpy(host)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

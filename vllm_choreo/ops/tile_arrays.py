# SPDX-License-Identifier: Apache-2.0
"""A plan of tiles in host memory, as it was cut, before it goes to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_choreo.ops.sending import send_all
from vllm_choreo.ops.tiles import TileClass, Tiles


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
        of_classes = (array for one in self.classes for array in one[1:])
        tensors = send_all([*self.common.values(), *of_classes], device)
        common = {name: next(tensors) for name in self.common}
        classes = tuple(
            TileClass(one.num_rows, *(next(tensors) for _ in range(4))) for one in self.classes
        )
        return Tiles(classes=classes, num_partials=self.num_partials, **common)

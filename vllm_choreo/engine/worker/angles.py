# SPDX-License-Identifier: Apache-2.0
"""Angles of spans on the device, computed once for each distance that queries turn by."""

from __future__ import annotations

import numpy as np
import torch

from vllm_choreo.engine.worker.tensors import to_device
from vllm_choreo.ops import Rotation

# Distances that are kept: 8 MiB at 128 numbers each. Where more would be, all are forgotten.
_MOST = 16 * 1024


class Angles:
    """Cosines and sines of one rotation, kept from step to step.

    Args:
        rotation: the rotation.
        device: device on which they are needed.
    """

    def __init__(self, rotation: Rotation, device: torch.device) -> None:
        self._rotation = rotation
        self._device = device
        # In the order in which distances came; what plans are given is a copy.
        self._table = torch.empty(_MOST, rotation.rotary_dim, device=device)
        self._deltas: np.ndarray = np.empty(0, dtype=np.int32)  # ascending
        self._rows: np.ndarray = np.empty(0, dtype=np.int64)  # row of each of these in the table

    def of(self, deltas: torch.Tensor) -> torch.Tensor:
        """Angles of spans, as `Rotation.cos_sin` has them, on the device.

        Args:
            deltas: int32 `[num_spans]`, in host memory.
        """
        wanted = deltas.numpy()
        if len(wanted) > _MOST:
            return to_device(self._rotation.cos_sin(deltas), self._device)
        at, is_known = self._look_up(wanted)
        if not is_known.all():
            new = np.unique(wanted[~is_known])
            if len(self._deltas) + len(new) > _MOST:
                self._deltas, self._rows = self._deltas[:0], self._rows[:0]
                new = np.unique(wanted)
            self._add(new)
            at, _ = self._look_up(wanted)
        return self._table.index_select(
            0, to_device(torch.from_numpy(self._rows[at]), self._device)
        )

    def _look_up(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places among the distances that are kept, and whether these are the wanted ones."""
        at = np.asarray(np.searchsorted(self._deltas, wanted))
        is_known = np.append(self._deltas, 0)[at] == wanted
        return at, is_known & (at < len(self._deltas))

    def _add(self, deltas: np.ndarray) -> None:
        rows = np.arange(len(self._rows), len(self._rows) + len(deltas))
        added = self._rotation.cos_sin(torch.from_numpy(deltas))
        self._table[rows[0] : rows[-1] + 1] = to_device(added, self._device)
        known = np.concatenate([self._deltas, deltas])
        order = np.argsort(known)
        self._deltas, self._rows = known[order], np.concatenate([self._rows, rows])[order]

# SPDX-License-Identifier: Apache-2.0
"""Plans on their way from host memory to a device: integers, many arrays in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

# Arrays lie at multiples of so many int32 numbers in the buffer that is sent, 16 bytes: Triton
# compiles other kernels for tensors that begin elsewhere.
_ALIGNMENT = 4


def padded(size: int) -> int:
    """Numbers that an array of this size takes up in a buffer."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def send(host: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy an array to a device, without waiting for what runs there."""
    tensor = torch.from_numpy(host)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_all(arrays: Sequence[np.ndarray], device: torch.device | str) -> Iterator[torch.Tensor]:
    """Copy integers to a device at once, as int32 tensors of the arrays' shapes."""
    sizes = [padded(array.size) for array in arrays]
    host: np.ndarray = np.zeros(sum(sizes), dtype=np.int32)
    begin = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[begin : begin + array.size] = array.ravel()
        begin += size
    parts = send(host, device).split(sizes)
    return (part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True))

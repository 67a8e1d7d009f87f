# SPDX-License-Identifier: Apache-2.0
"""Tensors from lists of Python, and to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, without waiting for what runs there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def int32(values: Sequence[int]) -> torch.Tensor:
    """A host tensor."""
    return torch.tensor(values, dtype=torch.int32)

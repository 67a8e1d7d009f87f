# SPDX-License-Identifier: Apache-2.0
"""Tensors made of Python's lists, and moved to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device, without waiting for what runs there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def int32(values: Sequence[int]) -> torch.Tensor:
    """Int32 tensor of `values`, in host memory."""
    return torch.tensor(values, dtype=torch.int32)

# SPDX-License-Identifier: Apache-2.0
"""Spans of a batch that count by other weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.tensors import int32, to_device
from vllm_choreo.ops import Reweighting


def reweighting_of(requests: Sequence[RequestSpans], device: torch.device) -> Reweighting | None:
    """Weights by which requests attend; None: all spans count alike.

    Args:
        requests: spans of each request; its own span, which is not among them, comes last.
    """
    if not any(request.weights for request in requests):
        return None
    is_chosen: list[int] = []
    for request in requests:
        parents = request.parent or range(len(request.first_slot))
        is_chosen += [int(request.weights is not None and j > 0) for j in parents]
        is_chosen.append(0)
    weights = torch.tensor([request.weights or (1.0, 1.0) for request in requests])
    temperature, factor = (to_device(column.contiguous(), device) for column in weights.T)
    return Reweighting(int32(is_chosen), temperature, factor)

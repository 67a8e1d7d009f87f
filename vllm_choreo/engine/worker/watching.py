# SPDX-License-Identifier: Apache-2.0
"""Attention that tokens receive, summed in some layers while the model runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_choreo.ops import LayerAttention, SpanPlan
from vllm_choreo.ops.reference import attention_received


class AttentionWatch:
    """Sum of attention over runs of one request's tokens, in the heads of this worker.

    Args:
        layers: layers that count.

    Attributes:
        received: attention of each parent's tokens, float32 `[num_tokens]` per parent.
    """

    def __init__(self, layers: Iterable[LayerAttention]) -> None:
        self._layers = {id(layer) for layer in layers}
        self.received: list[torch.Tensor] = []

    def see(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: SpanPlan,
        layer: LayerAttention,
    ) -> None:
        """Add a layer's attention, if the layer counts; the arguments of `ops.span_attention`."""
        if id(layer) not in self._layers:
            return
        found = attention_received(query, kv_cache, plan, layer)
        before = self.received or [torch.zeros_like(span) for span in found]
        self.received = [a + b for a, b in zip(before, found, strict=True)]

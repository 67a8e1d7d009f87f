# SPDX-License-Identifier: Apache-2.0
"""Attention that tokens receive, summed in some layers while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vllm_choreo.ops import LayerAttention, SpanPlan
from vllm_choreo.ops.reference import attention_received


class AttentionWatch:
    """Sum of attention over runs of one request's tokens, in the heads of this worker.

    Args:
        layers: layers that count, each with the numbers of the parents that it reads: of those of
            which it reads a part, that is the end.
        num_tokens: tokens of each parent.

    Attributes:
        received: attention of each parent's tokens, float32 `[num_tokens]` per parent.
    """

    def __init__(
        self, layers: Iterable[tuple[LayerAttention, Sequence[int]]], num_tokens: Sequence[int]
    ) -> None:
        self._parents = {id(layer): parents for layer, parents in layers}
        self.received = [torch.zeros(count) for count in num_tokens]

    def see(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: SpanPlan,
        layer: LayerAttention,
    ) -> None:
        """Add a layer's attention, if the layer counts; the arguments of `ops.span_attention`."""
        if id(layer) not in self._parents:
            return
        found = attention_received(query, kv_cache, plan, layer)
        for parent, span in zip(self._parents[id(layer)], found, strict=True):
            received = self.received[parent].to(span.device)
            received[len(received) - len(span) :] += span
            self.received[parent] = received

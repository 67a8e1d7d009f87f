# SPDX-License-Identifier: Apache-2.0
"""The attention backend on CPU: vLLM's own, which hands choreographed batches to our operation."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_choreo.engine.batch import ChoreoBatch
from vllm_choreo.engine.probe import QueryRecorder
from vllm_choreo.ops import Rotation, span_attention


class ChoreoCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with another implementation class."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return ChoreoCPUImpl


class ChoreoCPUImpl(CPUAttentionBackendImpl):
    """Ordinary batches go to vLLM's kernel unchanged, others to `ops.span_attention`.

    Attributes:
        rotation: the layer's rotary embedding as the position probe found it; None: it has none.
    """

    rotation: Rotation | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `CPUAttentionBackendImpl.forward`, which says what the arguments are."""
        if isinstance(attn_metadata, QueryRecorder):
            return attn_metadata.record(layer, query, key, value, output)
        batch: ChoreoBatch | None = getattr(attn_metadata, "choreo", None)
        if batch is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        rotation = self.rotation
        span_attention(
            query,
            kv_cache,
            output,
            batch.spans,
            scale=self.scale,
            cos_sin=None if rotation is None else batch.cos_sin[rotation],
            is_neox=rotation is None or rotation.is_neox,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            reads=batch.reads,
        )
        return output

# SPDX-License-Identifier: Apache-2.0
"""Mixin of our implementations of multi-head latent attention (MLA), over vLLM's.

A token's row in the cache is the latent `c`, which has no position, and one rotated key `k_pe` for
all heads. vLLM's layer has two ways: tokens that decode are *absorbed*, so that all heads attend to
the rows as they lie, prompts expand keys and values of each head. All tokens of a batch that reads
spans go the absorbed way: queries are `[latent, q_pe]`, of which a span's delta turns `q_pe`,
values are the latents, and spans are merged before the layer expands what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)

from vllm_choreo.engine.worker.attention import SpanReader
from vllm_choreo.engine.worker.probe import QueryRecorder
from vllm_choreo.ops import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


class ChoreoMLAImpl(SpanReader):
    """Attention by vLLM's implementation for ordinary batches, `ops.span_attention` for others.

    Mixed in before one of vLLM's implementations. Rows of the batch are stored before either of
    its methods is called.
    """

    layout = Layout.LATENT

    # Of vLLM's implementations.
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    kv_b_proj: torch.nn.Module

    @property
    def value_size(self) -> int:  # type: ignore[override]
        return self.kv_lora_rank

    def kv_cache_of(self, layer: MLAAttention) -> torch.Tensor:
        """KV cache of the layer, `[num_blocks, 1, block_size, head_size]`."""
        return layer.kv_cache.unsqueeze(1)

    def store(
        self,
        layer: MLAAttention,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store rows as vLLM does, in a cache like `kv_cache_of`.

        Args:
            keys: rows, `[num_tokens, 1, head_size]`, which begin with the values.
        """
        self.do_kv_cache_update(  # type: ignore[attr-defined]
            values[:, 0],
            keys[..., self.kv_lora_rank :],
            kv_cache.squeeze(1),
            slots,
            layer.kv_cache_dtype,
            torch.ones((), device=kv_cache.device),  # nothing is quantized
        )

    def step_metadata(self, query_start_loc: torch.Tensor) -> MLACommonMetadata:
        """Metadata by which the layer takes all tokens of a batch the absorbed way.

        Args:
            query_start_loc: int32 `[num_reqs + 1]`.
        """
        return _absorbed(query_start_loc, int(query_start_loc[-1]))

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: object,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Extend vLLM's method, which runs prompts: the probe records queries and keys."""
        if isinstance(attn_metadata, QueryRecorder):
            self._record(attn_metadata, q, kv_c_normed, k_pe, output)
            return
        super().forward_mha(  # type: ignore[misc]
            q,
            kv_c_normed,
            k_pe,
            kv_c_and_k_pe_cache,
            attn_metadata,
            k_scale,
            output,
            output_scale,
        )

    def _record(
        self,
        recorder: QueryRecorder,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Record with what rotates in front, and pass each token's own value through."""
        nope = self.qk_nope_head_dim
        expanded = self.kv_b_proj(kv_c_normed)[0].view(len(q), -1, nope + self.v_head_dim)
        value = expanded[..., nope:]
        query = torch.cat((q[..., nope:], q[..., :nope]), -1)
        key = torch.cat((k_pe, kv_c_normed[:, None]), -1)
        recorder.record(self.layer_name, query, key, value, output)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: object,
        layer: MLAAttention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Extend vLLM's method, which runs absorbed tokens, by batches that read spans."""
        batcher = self.batcher
        if batcher is None or batcher.running is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        self.attend(query, kv_c_and_k_pe_cache.unsqueeze(1), output)
        return output, None


class ChoreoMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's metadata builder, which sends batches that read spans the absorbed way."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._impl: ChoreoMLAImpl = layers[layer_names[0]].impl

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        batcher = self._impl.batcher
        if batcher is None or batcher.running is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = common_attn_metadata
        return _absorbed(given.query_start_loc, given.num_actual_tokens)


def _absorbed(query_start_loc: torch.Tensor, num_tokens: int) -> MLACommonMetadata:
    """Metadata of a batch all of whose tokens are absorbed; spans say what they read."""
    nothing = query_start_loc[:0]
    num_reqs = len(query_start_loc) - 1
    return MLACommonMetadata(
        num_reqs=num_reqs,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_actual_tokens=num_tokens,
        query_start_loc=query_start_loc,
        slot_mapping=nothing,
        num_decodes=num_reqs,
        num_decode_tokens=num_tokens,
        num_prefills=0,
        decode=MLACommonDecodeMetadata(nothing, nothing, None),
    )

# SPDX-License-Identifier: Apache-2.0
"""Mixins of our attention implementations, over vLLM's, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_choreo.engine.worker.layer_kinds import LayerKind
from vllm_choreo.engine.worker.probe import QueryRecorder
from vllm_choreo.engine.worker.span_batcher import SpanBatcher
from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    QuantizedKV,
    Rotation,
    default_impl,
    span_attention,
)
from vllm_choreo.ops.dispatch import Impl
from vllm_choreo.ops.flash_prefills import FlashAttention

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey


class SpanReader:
    """Part of a layer that reads spans, whatever vLLM's implementation beside it is.

    Attributes:
        layout: layout in which vLLM's implementation stores keys and values.
        value_size: numbers of a value in a latent cache, see `LayerAttention`; None: it is none.
        layer_name: name of the layer, of which the runner tells.
        reads_context: True if vLLM's implementation runs prompts of which a part is computed.
        kernels: module of `ops` that runs choreographed batches; None: the default of the CPU.
        rotation: the layer's rotary embedding as the position probe found it; None: it has none.
        batcher: the worker's batcher; None until choreography is prepared.
        plan_index: index of the layer's kind among the batcher's.
        attention: the layer as `ops.span_attention` takes it, set together with the batcher.
    """

    scale: float  # of vLLM's implementations

    layout: ClassVar[Layout]
    value_size: int | None = None
    layer_name: str
    reads_context: ClassVar[bool] = True
    kernels: ClassVar[Impl | None] = None
    rotation: Rotation | None = None
    batcher: SpanBatcher | None = None
    plan_index: int
    attention: LayerAttention

    @classmethod
    def resolved_kernels(cls) -> Impl:
        """Name of the module of `vllm_choreo.ops` that runs choreographed batches."""
        return cls.kernels or default_impl()

    def prepare(
        self, batcher: SpanBatcher, kind: LayerKind, quantized: QuantizedKV | None = None
    ) -> None:
        """Have the layer read, from now on, what the batcher plans for its kind.

        Args:
            quantized: meaning of the bytes in the layer's KV cache; None: it holds numbers.
        """
        rotation, sinks = kind.rotation, getattr(self, "sinks", None)
        self.rotation, self.plan_index = rotation, batcher.kinds.index(kind)
        self.attention = LayerAttention(
            scale=self.scale,
            is_neox=rotation is None or rotation.is_neox,
            softcap=getattr(self, "logits_soft_cap", 0.0),
            alibi_slopes=getattr(self, "alibi_slopes", None),
            window=kind.shape.window,
            sinks=None if sinks is None else sinks.detach().float(),
            layout=self.layout,
            quantized=quantized,
            value_size=self.value_size,
        )
        self.batcher = batcher

    def flash_attention(self) -> FlashAttention | None:
        """FlashAttention for long prefills, over the cache of the layer; None: there is none."""
        return None

    def describe(self) -> dict[str, Any]:
        """Window, sinks and cache of the layer, as plain data."""
        quantized = self.attention.quantized
        return {
            "window": self.attention.window,
            "sinks": self.attention.sinks is not None,
            "kv_dtype": quantized and quantized.name,
            "kv_scales": quantized and [quantized.key_scale, quantized.value_scale],
        }

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> bool:
        """Run the batch if it reads spans; return whether it does.

        Args:
            query, kv_cache, output: arguments of `ops.span_attention`.
        """
        batcher = self.batcher
        if batcher is None or batcher.running is None:
            return False
        plan = batcher.running[self.plan_index]
        if batcher.watch is not None:
            batcher.watch.see(query, kv_cache, plan, self.attention)
        span_attention(query, kv_cache, output, plan, self.attention, self.kernels)
        return True

    def kv_cache_of(self, layer: Attention) -> torch.Tensor:
        """KV cache of the layer, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
        return layer.kv_cache

    def store(
        self,
        layer: Attention,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store keys and values as vLLM does, in a cache like `kv_cache_of`."""
        raise NotImplementedError

    def step_metadata(self, query_start_loc: torch.Tensor) -> object:
        """Metadata that the layer needs to run a batch that reads spans: none."""
        return None

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Return False: the output of `ops.span_attention` is not quantized."""
        return False


class ChoreoImpl(SpanReader):
    """Attention by vLLM's implementation for ordinary batches, `ops.span_attention` for others.

    Mixed in before one of vLLM's implementations. vLLM has stored the keys and values of the
    batch before it calls `forward` (`forward_includes_kv_cache_update` of the backend is False).
    """

    def store(
        self,
        layer: Attention,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.do_kv_cache_update(layer, keys, values, kv_cache, slots)  # type: ignore[attr-defined]

    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: object,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Extend vLLM's method, which describes the arguments, by batches that read spans.

        With CUDA graphs `query` and `output` may have rows of padding; they are left alone.
        """
        if isinstance(attn_metadata, QueryRecorder):
            if key is None or value is None:  # they are those of an earlier layer
                source = layer.kv_sharing_target_layer_name
                return attn_metadata.record_shared(self.layer_name, query, source, output)
            return attn_metadata.record(self.layer_name, query, key, value, output)
        if self.attend(query, kv_cache, output):
            return output
        return super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

# SPDX-License-Identifier: Apache-2.0
"""Operations on cached keys and values. Needs torch only, never vllm."""

from vllm_choreo.ops.adapter_factors import AdapterFactors, factors_of
from vllm_choreo.ops.dispatch import add_adapter, default_impl, reposition_keys, span_attention
from vllm_choreo.ops.layout import Layout, UnsupportedLayoutError, detect_layout
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.quantized import QuantizedKV
from vllm_choreo.ops.sharing import SharedReads, plan_shared_reads
from vllm_choreo.ops.spans import Reweighting, Rotation, SpanBatch

__all__ = [
    "AdapterFactors",
    "LayerAttention",
    "Layout",
    "QuantizedKV",
    "Reweighting",
    "Rotation",
    "SharedReads",
    "SpanBatch",
    "SpanPlan",
    "UnsupportedLayoutError",
    "add_adapter",
    "default_impl",
    "detect_layout",
    "factors_of",
    "plan_shared_reads",
    "reposition_keys",
    "span_attention",
]

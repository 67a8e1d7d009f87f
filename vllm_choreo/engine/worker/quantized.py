# SPDX-License-Identifier: Apache-2.0
"""How a layer's KV cache is quantized, from vLLM's layer to what the operations read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.kv_dtype import quantized_name
from vllm_choreo.ops import QuantizedKV

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


def quantized_kv(layer: Attention) -> QuantizedKV | None:
    """Meaning of the bytes in a layer's KV cache; None: it holds the model's dtype.

    Raises:
        UnsupportedModelError: the layer has a scale for each head.
    """
    name = quantized_name(layer.kv_cache_dtype)
    if name is None:
        return None
    if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
        raise UnsupportedModelError(
            "the checkpoint has a scale of keys or values for each head, and choreography reads "
            "caches with one for each layer: use another checkpoint, or run this one without the "
            'plugin (VLLM_PLUGINS="")',
            parameter="model",
            value=layer.layer_name,
        )
    return QuantizedKV(
        getattr(torch, name), float(layer._k_scale_float), float(layer._v_scale_float)
    )

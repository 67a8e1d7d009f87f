# SPDX-License-Identifier: Apache-2.0
"""FlashAttention for the long prefills of an engine, where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_choreo.engine.worker.quantized import quantized_kv
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.ops.flash_prefills import FlashAttention

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


def flash_attention_of(layers: Mapping[str, Attention]) -> FlashAttention:
    """FlashAttention that runs long prefills of all layers.

    Raises:
        UnsupportedOptionError: it cannot run a layer's; names the layer and the reason.
    """
    found: FlashAttention | None = None
    for name, layer in layers.items():
        impl = layer.impl
        found = impl.flash_attention()
        reasons = {
            f"has the backend {layer.attn_backend.get_name()}": found is None,
            # Windows are of positions, which do not follow one another from span to span.
            "has a sliding window": getattr(layer, "sliding_window", None) is not None,
            "has slopes (ALiBi)": getattr(impl, "alibi_slopes", None) is not None,
            "has sinks": getattr(impl, "sinks", None) is not None,
            "keeps keys and values in 8 bits": quantized_kv(layer) is not None,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise UnsupportedOptionError(
                    f"FlashAttention runs long prefills of plain layers over the backend "
                    f"FLASH_ATTN, and layer {name} {reason}: leave it out",
                    parameter="additional_config.choreo.flash_prefills",
                    value=True,
                )
    assert found is not None
    return found

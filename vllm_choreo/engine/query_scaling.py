# SPDX-License-Identifier: Apache-2.0
"""Models that scale queries by their position, as they declare and the probe then proves.

In such a model scores depend on where a query stands, not on its distance from a key alone. Virtual
indices would scale it wrongly, so all calls are *placed*: see `semantics.positions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DECLARED = ("llama_4_scaling", "attn_temperature_tuning")


def scales_queries(text_config: PretrainedConfig) -> bool:
    """Return whether a model scales its queries by their position, as its configuration has it.

    Args:
        text_config: the model's text configuration, as vLLM completes it.

    Source: `llama_4_scaling` of vLLM's Mistral models; Llama 4's `attn_temperature_tuning`, of the
    layers without rotation.
    """
    return any(getattr(text_config, name, None) for name in _DECLARED)

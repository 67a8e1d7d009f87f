# SPDX-License-Identifier: Apache-2.0
"""Engines whose calls may have pictures, and why others have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_choreo.engine.speculation import has_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Models in which a picture of a grid takes as many positions as its longest side is long.
_GRID_MODELS = ("paddleocr_vl",)


def reason_for_no_pictures(vllm_config: VllmConfig, has_memory: bool) -> str | None:
    """Reason why calls of an engine have no pictures; None: they may have some.

    Args:
        has_memory: whether the engine has memory for pictures of messages.
    """
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    reasons = {
        "this model takes no pictures": multimodal is None,
        "the engine was started without memory for pictures "
        "(additional_config.choreo.picture_memory_gib)": not has_memory,
        "tokens of a picture attend to one another in this model, also to later ones, which vLLM "
        "knows of prompts alone": model.is_mm_prefix_lm,
        "of models whose positions have several rows (M-RoPE), pictures were run in messages of "
        f"{', '.join(_GRID_MODELS)} alone": model.uses_mrope
        and model.hf_config.model_type not in _GRID_MODELS,
        "models with states take no pictures in messages": model.is_hybrid,
        "drafters with layers were not run with pictures in messages": has_layers(
            vllm_config.speculative_config
        ),
        "KV and encoder connectors were not run with pictures in messages": bool(
            vllm_config.kv_transfer_config or vllm_config.ec_transfer_config
        ),
        "a picture must be encoded again when a message was evicted, and with "
        "mm_processor_cache_type='shm' vLLM may have dropped it": multimodal is not None
        and multimodal.mm_processor_cache_type == "shm",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)

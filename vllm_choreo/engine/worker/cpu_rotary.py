# SPDX-License-Identifier: Apache-2.0
"""Rotation on CPU of queries and keys that come by heads, as MLA and LFM2 have them.

vLLM's operator for CPUs takes the distance between two heads for that between two tokens where it
is given `[num_tokens, num_heads, head_size]`: what it turns then is neither. vLLM's own code in
torch, which some of its rotary embeddings run on CPU anyway, is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_BY_HEADS = ("lfm2", "lfm2_moe")


def rotates_by_heads(model_config: ModelConfig) -> bool:
    """Return whether a model gives its rotary embeddings `[num_tokens, num_heads, head_size]`."""
    return bool(model_config.use_mla) or model_config.hf_text_config.model_type in _BY_HEADS


def correct_rotary(model: torch.nn.Module) -> None:
    """Have rotary embeddings that run vLLM's operator for CPUs run its code in torch.

    Args:
        model: a loaded model of which `rotates_by_heads` is true, on the CPU.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module._forward_method = module.forward_native

# SPDX-License-Identifier: Apache-2.0
"""Rotation on CPU of queries and keys that are parts of wider rows, as MLA has them.

vLLM's operator for CPUs takes the distance between two heads for that between two tokens where it
is given `[num_tokens, num_heads, head_size]`: what it turns then is neither. vLLM's own code in
torch, which some of its rotary embeddings run on CPU anyway, is right.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def correct_rotary(model: torch.nn.Module) -> None:
    """Have rotary embeddings that run vLLM's operator for CPUs run its code in torch.

    Args:
        model: a loaded model with MLA, on the CPU.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module._forward_method = module.forward_native

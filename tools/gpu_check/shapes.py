# SPDX-License-Identifier: Apache-2.0
"""Attention layers of models that are served, by which kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionShape:
    """
    Attributes:
        rotary_dim: dims of a head that are rotated; None: all of them, 0: none.
        is_neox: whether dim i is rotated with dim i + rotary_dim / 2, else with its neighbour.
        window: of a sliding window, in tokens; None: there is none.
        reweighted: whether some parents' attention is scaled.
        block_size: tokens in a KV block.
        value_size: numbers of a value in a latent cache (MLA), behind which keys rotate; None: it
            is none.
        prefills: whether only what surrounds FlashAttention in long prefills is compiled.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    rotary_dim: int | None = None
    is_neox: bool = True
    softcap: float = 0.0
    alibi: bool = False
    window: int | None = None
    sinks: bool = False
    reweighted: bool = False
    block_size: int = 16
    value_size: int | None = None
    prefills: bool = False


def _latent(num_heads: int) -> AttentionShape:
    """MLA: a row of the cache is a latent of 512 numbers and 64 that rotate, for all heads."""
    return AttentionShape(num_heads, 1, 576, rotary_dim=64, is_neox=False, value_size=512)


SHAPES = {
    "llama-8b": AttentionShape(32, 8, 128),
    "llama-8b-fp16": AttentionShape(32, 8, 128, torch.float16),
    "llama-8b-fp32": AttentionShape(32, 8, 128, torch.float32),
    "llama-70b": AttentionShape(64, 8, 128),
    "llama-70b-tp8": AttentionShape(8, 1, 128),
    "llama-1b": AttentionShape(32, 8, 64),
    "llama-8b-reweighted": AttentionShape(32, 8, 128, reweighted=True),
    "llama-8b-blocks-of-64": AttentionShape(32, 8, 128, block_size=64),
    "llama-8b-prefills": AttentionShape(32, 8, 128, prefills=True),
    "glm-4-9b-prefills": AttentionShape(*(32, 2, 128), rotary_dim=64, is_neox=False, prefills=True),
    "qwen3-14b": AttentionShape(40, 8, 128),
    "qwen2.5-7b": AttentionShape(28, 4, 128),
    "qwen3-30b-a3b": AttentionShape(32, 4, 128),
    "phi-3-mini": AttentionShape(32, 32, 96),
    "phi-2": AttentionShape(32, 32, 80, rotary_dim=32),
    "glm-4-9b": AttentionShape(32, 2, 128, rotary_dim=64, is_neox=False),
    "bloom": AttentionShape(32, 32, 128, rotary_dim=0, alibi=True),
    "smollm3-no-positions": AttentionShape(32, 8, 128, rotary_dim=0),
    "gemma-2-9b": AttentionShape(16, 8, 256, softcap=50.0),
    "gemma-2-9b-window": AttentionShape(16, 8, 256, softcap=50.0, window=4096),
    "gemma-3-27b-window": AttentionShape(32, 16, 128, window=1024),
    "gemma-3-270m-fp32": AttentionShape(4, 1, 256, torch.float32, window=512),
    "gpt-oss": AttentionShape(64, 8, 64, sinks=True),
    "gpt-oss-window": AttentionShape(64, 8, 64, window=128, sinks=True),
    "smollm2-135m-fp32": AttentionShape(9, 3, 64, torch.float32),
    "starcoder": AttentionShape(48, 1, 128, rotary_dim=0),
    "falcon-7b": AttentionShape(71, 1, 64),
    "deepseek-v3": _latent(128),
    "deepseek-v2-lite": _latent(16),
    "head-192": AttentionShape(32, 8, 192),
    "head-32-fp16": AttentionShape(8, 8, 32, torch.float16),
}

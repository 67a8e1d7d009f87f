# SPDX-License-Identifier: Apache-2.0
"""Storing of MLA's latents in PyTorch, where vLLM's compiled operation for GPUs is not there."""

from __future__ import annotations

import torch


def store_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Store latents at their slots, as vLLM's `concat_and_cache_mla` does, in the cache's dtype.

    Args:
        kv_c: latents, `[num_tokens, kv_lora_rank]`.
        k_pe: rotated keys, `[num_tokens, rotary_dim]` or `[num_tokens, 1, rotary_dim]`.
        kv_cache: `[num_blocks, block_size, kv_lora_rank + rotary_dim]`, written.
        slot_mapping: int64 `[num_stored]`, slots of the first tokens; below 0: not stored. Such
            rows leave slot 0, which is nobody's, as it is, so that nothing waits for the device.
        kv_cache_dtype, scale: not used, for nothing is quantized.
    """
    rows = torch.cat((kv_c, k_pe.view(len(kv_c), -1)), -1)[: len(slot_mapping)]
    cache, slots = kv_cache.view(-1, kv_cache.shape[-1]), slot_mapping.clamp(min=0)
    cache.index_copy_(0, slots, torch.where((slot_mapping >= 0)[:, None], rows, cache[slots]))

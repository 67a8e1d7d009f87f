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
    """Store latents at their slots; rows without one leave block 0, which is nobody's, as it is."""
    rows = torch.cat((kv_c, k_pe.view(len(kv_c), -1)), -1)[: len(slot_mapping)]
    cache, slots = kv_cache.view(-1, kv_cache.shape[-1]), slot_mapping.clamp(min=0)
    cache.index_copy_(0, slots, torch.where((slot_mapping >= 0)[:, None], rows, cache[slots]))

# SPDX-License-Identifier: Apache-2.0
"""Sizes of vLLM's KV cache, of which scheduler and workers must think alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a block in all layers of a worker, those of a drafter among them."""
    num_bytes = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        is_sum = isinstance(spec, UniformTypeKVCacheSpecs)
        num_bytes += spec.page_size_bytes * (1 if is_sum else len(group.layer_names))
    return num_bytes

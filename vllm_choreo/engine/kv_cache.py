# SPDX-License-Identifier: Apache-2.0
"""Sizes and groups of vLLM's KV cache, of which scheduler and workers must think alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def block_bytes(kv_cache_config: KVCacheConfig, sharing_layers: Collection[str] = ()) -> int:
    """Bytes of a block in all layers of a worker that use it, those of a drafter among them.

    A block belongs to one KV cache group at a time, and is as large as the largest needs it.

    Args:
        sharing_layers: layers that read what others store; vLLM's workers add them to groups.
    """
    groups = kv_cache_config.kv_cache_groups
    return max((_block_bytes(group, sharing_layers) for group in groups), default=0)


def _block_bytes(group: KVCacheGroupSpec, sharing_layers: Collection[str]) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.page_size_bytes
    return spec.page_size_bytes * sum(name not in sharing_layers for name in group.layer_names)


def num_kinds(kv_cache_config: KVCacheConfig, has_window_groups: bool) -> int:
    """Number of kinds of KV cache, where those that choreography serves together count as one.

    Args:
        has_window_groups: whether layers with windows may be groups of their own.
    """
    groups = kv_cache_config.kv_cache_groups
    if not has_window_groups:
        return len(groups)
    served = (FullAttentionSpec, SlidingWindowSpec)
    return 1 + sum(type(group.kv_cache_spec) not in served for group in groups)


def windows_of_groups(kv_cache_config: KVCacheConfig) -> tuple[int | None, ...]:
    """Sliding window of each KV cache group, whose blocks vLLM lets go of; None: it has none."""
    return tuple(map(_window, kv_cache_config.kv_cache_groups))


def _window(group: KVCacheGroupSpec) -> int | None:
    spec = group.kv_cache_spec
    return spec.sliding_window if type(spec) is SlidingWindowSpec else None


def groups_of_layers(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Number of the KV cache group of each layer, by its name."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names}

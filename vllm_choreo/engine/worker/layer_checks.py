# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's attention layers, before anything is read by spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.worker.attention import SpanReader
from vllm_choreo.errors import UnsupportedModelError, UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def attention_layers(vllm_config: VllmConfig) -> dict[str, Attention]:
    """Layers with attention, those with MLA included, by their names."""
    dense = get_layers_from_vllm_config(vllm_config, Attention)
    return {**dense, **get_layers_from_vllm_config(vllm_config, MLAAttention)}


def source_of(layer: Attention) -> str | None:
    """Name of the earlier layer whose keys and values a layer reads; None: it has its own."""
    source: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return source


def check_seen(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, found: Mapping[str, Attention]
) -> None:
    """Check that all layers with keys and values are of vLLM's class `Attention`.

    Raises:
        UnsupportedModelError: one is not; what we do to layers would miss it.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if name not in found:
                raise UnsupportedModelError(
                    f"layer {name} keeps what it reads of earlier tokens in a way of its own "
                    f"({type(layers.get(name)).__name__}, not vLLM's Attention), which cannot be "
                    'choreographed; run this model without the plugin (VLLM_PLUGINS="")',
                    parameter="model",
                    value=name,
                )


def check_shared_memory(caches: Mapping[str, torch.Tensor]) -> None:
    """Check that layers of several KV cache groups that lie over one another look alike.

    So a block's bytes are the same, of whichever group it is.

    Raises:
        UnsupportedModelError: two of them do not.
    """
    first_at: dict[int, str] = {}
    for name, cache in caches.items():
        first = first_at.setdefault(cache.data_ptr(), name)
        looks = [(c.shape, c.stride(), c.dtype) for c in (cache, caches[first])]
        if looks[0] != looks[1]:
            raise UnsupportedModelError(
                f"layers {first} and {name} have keys and values of other shapes, in KV cache "
                "groups that share memory: leave additional_config.choreo.window_groups out",
                parameter="model",
                value=name,
            )


def check_sizes(specs: Mapping[str, KVCacheSpec], layers: Mapping[str, Attention]) -> None:
    """Check that layers keep keys and values of one size where others read what they store.

    vLLM finds those others no place in a KV cache group whose layers are of several sizes.

    Args:
        specs: vLLM's specification of what each layer stores.
        layers: all attention layers.

    Raises:
        UnsupportedModelError: they do not.
    """
    sharing = [name for name, layer in layers.items() if source_of(layer)]
    sizes = sorted({spec.page_size_bytes for spec in specs.values()})
    if sharing and len(sizes) > 1:
        raise UnsupportedModelError(
            f"layer {sharing[0]} reads keys and values of an earlier layer, and layers store them "
            f"in several sizes (blocks of {' and '.join(map(str, sizes))} bytes), which cannot be "
            'choreographed together; run this model without the plugin (VLLM_PLUGINS="")',
            parameter="model",
            value=sharing[0],
        )


def check_sharing(
    layers: Mapping[str, Attention], config: ChoreoConfig, cache_config: CacheConfig
) -> None:
    """Check that nothing runs layers that share keys apart from those that store them.

    Raises:
        UnsupportedOptionError: an option does.
    """
    if layers and cache_config.kv_sharing_fast_prefill:
        raise UnsupportedOptionError(
            f"layer {next(iter(layers))} reads keys of an earlier layer, and would run for the "
            "last tokens of prompts alone, without the spans of calls: leave it out",
            parameter="kv_sharing_fast_prefill",
            value=True,
        )
    if layers and config.hidden_bytes:
        raise UnsupportedOptionError(
            f"layer {next(iter(layers))} reads keys of an earlier layer, so that layers cannot be "
            "run by themselves: leave it out",
            parameter="additional_config.choreo.hidden_memory_gib",
            value=config.hidden_memory_gib,
        )


def check_own_keys(layers: Mapping[str, Attention]) -> None:
    """Check that the layers of a drafter store what they read.

    Raises:
        UnsupportedModelError: one does not.
    """
    for name, layer in layers.items():
        if source := source_of(layer):
            raise UnsupportedModelError(
                f"layer {name} of the drafter reads the keys and values of {source}, which no "
                "drafter was run with beside calls: choose another one, or run this model without "
                'the plugin (VLLM_PLUGINS="")',
                parameter="speculative_config.model",
                value=name,
            )


def check_layer(name: str, layer: Attention, block_size: int) -> None:
    """Check that the layer's attention can read spans.

    Raises:
        UnsupportedModelError: it cannot.
    """
    impl = layer.impl
    if not isinstance(impl, SpanReader):
        found = f"the backend {type(impl).__name__}"
    elif getattr(layer.attn_backend, "supports_kv_cache_update_bypass", False):
        found = "keys that its model stores itself, where they cannot be probed"
    elif getattr(layer, "attention_chunk_size", None):
        found = f"attention in chunks of {layer.attention_chunk_size} tokens"
    elif getattr(impl, "use_alibi_sqrt", False) or getattr(impl, "chunk_lookback", -1) >= 0:
        found = "chunks, or biases by the root of the distance"
    elif (num_tokens := impl.kv_cache_of(layer).shape[2]) != block_size:
        found = f"blocks of {num_tokens} tokens where the engine has {block_size}"
    else:
        return
    raise UnsupportedModelError(
        f"layer {name} has {found}, which cannot be choreographed; run this model without the "
        'plugin (VLLM_PLUGINS="")',
        parameter="model",
        value=name,
    )

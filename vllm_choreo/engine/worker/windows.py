# SPDX-License-Identifier: Apache-2.0
"""Full KV cache of layers with sliding windows: they keep the keys and values of all tokens.

vLLM lets go of what a window has left behind, in a group of blocks of its own. A message is read by
calls that see it elsewhere, perhaps all of it inside their window, and has one list of blocks for
all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.choreo.windows")  # vLLM prints the lines of loggers named after it


def widen_windows(
    specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> dict[str, KVCacheSpec]:
    """Replace the KV cache specs of layers with windows, so that vLLM makes one group of all.

    vLLM itself does so where its hybrid KV cache manager is disabled. The layers compute as before.

    Args:
        specs: vLLM's KV cache specs, by layer.
    """
    widened = {
        name: _full(spec, vllm_config.cache_config.block_size)
        if type(spec) is SlidingWindowSpec
        else spec
        for name, spec in specs.items()
    }
    num_windows = sum(type(spec) is SlidingWindowSpec for spec in specs.values())
    if num_windows:
        before, after = (
            sum(spec.max_memory_usage_bytes(vllm_config) for spec in of.values())
            for of in (specs, widened)
        )
        logger.info_once(
            "%d of %d layers have sliding windows. Messages keep their keys and values there, too: "
            "a text of %d tokens takes %.1f MiB of KV cache, where vLLM alone would need %.1f MiB.",
            num_windows,
            len(specs),
            vllm_config.model_config.max_model_len,
            after / 2**20,
            before / 2**20,
        )
    return widened


def _full(spec: SlidingWindowSpec, block_size: int) -> FullAttentionSpec:
    return replace_as(
        spec, FullAttentionSpec, drop=("extra_retained_tokens",), block_size=block_size
    )

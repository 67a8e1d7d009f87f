# SPDX-License-Identifier: Apache-2.0
"""Dtype of the KV cache: what vLLM's option says, and which of them choreography reads.

Imports neither torch nor vLLM: scheduler, workers and facades speak of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# torch's names of the numbers that vLLM stores, by the values of its option.
_STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def quantized_name(cache_dtype: str) -> str | None:
    """Name of torch's dtype of a cache in 8 bits; None for a value of any other kind."""
    return _STORED.get(cache_dtype)


def is_quantized(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's KV cache is in 8 bits."""
    return quantized_name(vllm_config.cache_config.cache_dtype) is not None


def kv_dtype(vllm_config: VllmConfig) -> str:
    """Name of torch's dtype of the numbers that an engine's KV cache holds."""
    model = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return quantized_name(vllm_config.cache_config.cache_dtype) or model


def adopt_declared(vllm_config: VllmConfig) -> None:
    """Set the dtype that a checkpoint of compressed-tensors declares, where the user set none."""
    if declares_8_bits(vllm_config):
        vllm_config.cache_config.cache_dtype = "fp8"


def declares_8_bits(vllm_config: VllmConfig) -> bool:
    """Return whether a checkpoint of compressed-tensors decides for 8 bits, as the user set none.

    vLLM decides so in the layers, in its workers alone, and for other checkpoints before this.
    """
    declared = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    if vllm_config.cache_config.cache_dtype != "auto" or not isinstance(declared, Mapping):
        return False
    is_scheme = declared.get("kv_cache_scheme") is not None
    return is_scheme and declared.get("quant_method") == "compressed-tensors"

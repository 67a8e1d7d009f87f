# SPDX-License-Identifier: Apache-2.0
"""Choice of the attention backend and of the KV cache's dtype on GPUs, of what vLLM allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_choreo.engine import mla
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.kv_dtype import declares_8_bits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.cuda import CudaPlatformBase

# vLLM's attention backends for which there are ours on GPUs; those of MLA are listed there.
_GPU_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
_NO_CHOREOGRAPHY = "there is no choreographed attention for it"


def hook(platform: type[CudaPlatformBase]) -> None:
    """Let layers of choreographed engines choose of our backends alone.

    vLLM asks each of its backends whether it runs a layer (sinks, pictures, dtype, size of heads),
    in an order of its own; where nobody named one, the first that says yes is taken.
    """
    get_valid_backends = platform.get_valid_backends

    def get_ours(cls: type[CudaPlatformBase], *args: object, **kwargs: object) -> Any:
        valid, reasons = get_valid_backends(*args, **kwargs)
        if not _is_choreographed():
            return valid, reasons
        ours = (*_GPU_BACKENDS, *mla.GPU_BACKENDS)
        others = {c.backend: c.priority for c in valid if c.backend.name not in ours}
        reasons.update({found: (at, [_NO_CHOREOGRAPHY]) for found, at in others.items()})
        return [c for c in valid if c.backend not in others], reasons

    platform.get_valid_backends = classmethod(get_ours)


def _is_choreographed() -> bool:
    """Return whether the engine whose layers are being made has our scheduler."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and str(config.scheduler_config.scheduler_cls).startswith(__package__)


def check_chosen(vllm_config: VllmConfig) -> None:
    """Check that there is a backend of ours for the one that the user named.

    Raises:
        UnsupportedOptionError: there is none.
    """
    chosen = vllm_config.attention_config.backend
    if chosen is not None and chosen.name not in _GPU_BACKENDS:
        raise UnsupportedOptionError(
            f"choreography has attention for {' and '.join(_GPU_BACKENDS)}: choose one of "
            'them or none, or run vLLM without the plugin (VLLM_PLUGINS="")',
            parameter="attention_config.backend",
            value=chosen.name,
        )


def choose_kv_dtype(vllm_config: VllmConfig) -> None:
    """Keep keys and values in the model's dtype where its checkpoint declares them in 8 bits.

    Choreography reads no cache in 8 bits on GPUs (see `plugin.py`).

    Raises:
        UnsupportedOptionError: the model computes in float32, which vLLM has no such option for.
    """
    from vllm.logger import init_logger

    if not declares_8_bits(vllm_config):
        return
    dtype = name_of_model_dtype(vllm_config)
    if dtype == "float32":
        raise UnsupportedOptionError(
            "the checkpoint declares a KV cache in 8 bits, which choreography does not read on "
            "GPUs, and vLLM keeps that of such a checkpoint in 16 bits else: choose bfloat16",
            parameter="dtype",
            value=dtype,
        )
    vllm_config.cache_config.cache_dtype = dtype
    init_logger("vllm.choreo").warning_once(
        "The checkpoint declares a KV cache in 8 bits, which choreography does not read on GPUs: "
        "keys and values are kept in %s, and take twice the memory.",
        dtype,
    )


def name_of_model_dtype(vllm_config: VllmConfig) -> str:
    """Name of the dtype in which the model computes."""
    return str(vllm_config.model_config.dtype).removeprefix("torch.")

# SPDX-License-Identifier: Apache-2.0
"""Configuration of engines whose model has multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Sizes of the latent and of the rotated key: of DeepSeek, Kimi K2 and Mistral Large 3, which were
# run; vLLM's kernel for CPUs takes no others.
_SIZES = (512, 64)
_CPU_BACKENDS = ("CPU_MLA",)
# Of vLLM's on GPUs. The others, whose kernels are compiled for CUDA, were not run in any way.
GPU_BACKENDS = ("TRITON_MLA",)
_WITHOUT = 'run vLLM without the plugin (VLLM_PLUGINS="")'


@contextmanager
def keeping_chunks(vllm_config: VllmConfig) -> Iterator[None]:
    """Keep what the engine was asked for of chunked prefill and prefix caching.

    vLLM turns both off on CPUs with MLA, for its attention cannot read what is computed there, as
    choreographed batches do; see `SpanReader.reads_context`.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    chunked, num_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
    cached = cache.enable_prefix_caching
    yield
    scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, num_tokens
    cache.enable_prefix_caching = cached


def choose_backend(vllm_config: VllmConfig) -> None:
    """Choose the one of vLLM's backends of MLA on CPUs for which there is ours."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if vllm_config.attention_config.backend is None:
        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA


def refuse_unsupported(vllm_config: VllmConfig, is_cpu: bool) -> None:
    """Refuse models and devices whose MLA cannot be choreographed.

    Raises:
        UnsupportedOptionError: says which, and why.
    """
    model = vllm_config.model_config
    found = _reason(vllm_config, is_cpu)
    if found is not None:
        raise UnsupportedOptionError(f"{found}: {_WITHOUT}", parameter="use_mla", value=model.model)


def _reason(vllm_config: VllmConfig, is_cpu: bool) -> str | None:
    """Reason for which the engine cannot be choreographed; None: it can."""
    config = vllm_config.model_config.hf_text_config
    backend = vllm_config.attention_config.backend
    sizes = tuple(getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if getattr(config, "compress_ratios", None) is not None:
        return (
            "this model (DeepSeek V4) stores states of several tokens together, between borders at "
            "fixed positions, so what is stored cannot be seen at others"
        )
    if getattr(config, "index_topk", None) is not None:
        return (
            "this model chooses what to attend to by an indexer (as DeepSeek V3.2), whose keys "
            "have positions, too, and choreography does not turn those yet"
        )
    served = _CPU_BACKENDS if is_cpu else GPU_BACKENDS
    if backend is not None and backend.name not in served:
        return (
            f"MLA is choreographed with the attention backend {' or '.join(served)} alone, not "
            f"{backend.name}; choose that or none, or else"
        )
    if vllm_config.lora_config is not None:
        return (
            "adapters do not work with MLA yet: vLLM merges a projection into the queries when the "
            "model is loaded, before there is an adapter (leave out enable_lora), or else"
        )
    if sizes != _SIZES:
        return (
            f"MLA is choreographed with a kv_lora_rank and qk_rope_head_dim of {_SIZES} alone, no "
            f"others were run, and this model has {sizes}"
        )
    return None

# SPDX-License-Identifier: Apache-2.0
"""Configurations of models that are served, without weights: what vLLM resolves an engine by.

Shapes of layers are those of the models; there are few layers, for layers of a kind are alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]
_NUM_LAYERS = 2
_ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        config: content of `config.json`.
        options: engine options beside those of all.
        refused: what the error says where choreography refuses the model on GPUs; None: served.
        why: what it is here for.
    """

    config: Config
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


def _config(
    architecture: str, model_type: str, heads: tuple[int, int, int], hidden: int, **other: object
) -> Config:
    """`config.json` of a model; heads are queries', keys' and the size of each."""
    num_heads, num_kv_heads, head_size = heads
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **other,
    }


def _llama(**other: object) -> Config:
    return _config("LlamaForCausalLM", "llama", (32, 8, 128), 4096, **other)


def _gemma3_text() -> Config:
    text = _config("Gemma3ForCausalLM", "gemma3_text", (8, 4, 256), 2560, sliding_window=1024)
    return {**text, "query_pre_attn_scalar": 256, "layer_types": _ALTERNATING}


def _gemma3_with_pictures() -> Config:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 1,
        "image_size": 896,
        "patch_size": 14,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": _gemma3_text(),
        "vision_config": vision,
        "mm_tokens_per_image": 256,
        "image_token_index": 1000,
        "boi_token_index": 1001,
        "eoi_token_index": 1002,
    }


def _gpt_oss() -> Config:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    shape = _config("GptOssForCausalLM", "gpt_oss", (64, 8, 64), 2880, sliding_window=128)
    return {
        **shape,
        "intermediate_size": 2880,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING,
        "attention_bias": True,
        "rope_parameters": rope,
        "swiglu_limit": 7.0,
    }


def _deepseek_v2() -> Config:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    shape = _config("DeepseekV2ForCausalLM", "deepseek_v2", (16, 16, 128), 2048, **sizes)
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": _NUM_LAYERS}
    return {**shape, **experts, "v_head_dim": 128, "q_lora_rank": None}


def _qwen2_vl() -> Config:
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "type": "mrope"}
    text = _config("Qwen2ForCausalLM", "qwen2_vl_text", (12, 2, 128), 1536, rope_scaling=rope)
    vision = {
        "model_type": "qwen2_vl",
        "depth": 1,
        "embed_dim": 1280,
        "hidden_size": 1536,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "mlp_ratio": 4,
        "in_channels": 3,
    }
    top = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    return {**text, **top, "vision_config": vision, "image_token_id": 1000, "video_token_id": 1001}


_FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "config_groups": {},
    "ignore": [],
}

_BY_TRITON = {"attention_backend": "TRITON_ATTN"}
MODELS = {
    "llama-8b": ServedModel(_llama(), "grouped queries, heads of 128"),
    "llama-8b-float32": ServedModel(
        _llama(), "float32, which FlashAttention has not", {"dtype": "float32"}
    ),
    "llama-8b-float16": ServedModel(_llama(), "float16", {"dtype": "float16"}),
    "qwen3-14b": ServedModel(
        _config("Qwen3ForCausalLM", "qwen3", (40, 8, 128), 5120), "norms of queries and keys"
    ),
    "phi-3-mini": ServedModel(
        _config("Phi3ForCausalLM", "phi3", (32, 32, 96), 3072, pad_token_id=0), "heads of 96"
    ),
    "mistral-window": ServedModel(
        _config("MistralForCausalLM", "mistral", (32, 8, 128), 4096, sliding_window=4096),
        "windows in all layers",
    ),
    "gemma-2-9b": ServedModel(
        {
            **_config("Gemma2ForCausalLM", "gemma2", (16, 8, 256), 3584, sliding_window=4096),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "layer_types": _ALTERNATING,
        },
        "heads of 256, soft cap, windows",
    ),
    "gemma-3-4b-text": ServedModel(_gemma3_text(), "windows, two rotations"),
    "gemma-3-4b-pictures": ServedModel(
        _gemma3_with_pictures(), "pictures, whose tokens see each other"
    ),
    "gemma-3-4b-pictures-by-triton": ServedModel(
        _gemma3_with_pictures(), "the same, by the backend that runs it", _BY_TRITON
    ),
    "gpt-oss": ServedModel(_gpt_oss(), "sinks and windows"),
    "gpt-oss-by-triton": ServedModel(
        _gpt_oss(), "the same, by the backend that runs it on all GPUs", _BY_TRITON
    ),
    "bloom": ServedModel(
        {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "torch_dtype": "bfloat16",
            "vocab_size": 1024,
            "hidden_size": 4096,
            "n_layer": _NUM_LAYERS,
            "n_head": 32,
            "seq_length": 2048,
        },
        "ALiBi",
    ),
    "qwen2-vl-2b": ServedModel(_qwen2_vl(), "M-RoPE", {"language_model_only": True}),
    "fp8-cache": ServedModel(
        _llama(quantization_config=_FP8_CACHE), "a checkpoint that declares a cache in 8 bits"
    ),
    "fp8-cache-as-bfloat16": ServedModel(
        _llama(quantization_config=_FP8_CACHE),
        "the same, where the user asks for 16 bits",
        {"kv_cache_dtype": "bfloat16"},
    ),
    "prompt-embeds": ServedModel(
        _llama(), "prompts given as embeddings", {"enable_prompt_embeds": True}
    ),
    "deepseek-v2-lite": ServedModel(_deepseek_v2(), "MLA"),
    "deepseek-v2-lite-by-flash-attention": ServedModel(
        _deepseek_v2(),
        "the same, by a backend for which there is none of ours",
        {"attention_backend": "FLASH_ATTN_MLA"},
        refused="with the attention backend TRITON_MLA alone",
    ),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the `config.json` of a model into a folder of its name; returns that."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(MODELS[name].config, indent=1))
    return path

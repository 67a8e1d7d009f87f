# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, one for each way in which positions enter attention.

How the weights make errors visible. Every linear weight is drawn from N(0, gain² / fan_in), so
that after a norm a query and a key are about N(0, gain²) in each component and their scaled dot
product has a standard deviation of about gain². With `ATTENTION_GAIN` that is 2 to 3: a token puts
most of its weight on a handful of keys, and which ones depends on the relative positions. The head
is scaled so that logits have a standard deviation of about `LOGIT_STD`. `test_oracle_self.py`
asserts both consequences: the spread of the logits, and that one wrong position, one hidden key or
one visible key too many moves log-probabilities by more than 100 times the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

VOCAB_SIZE = 512
MAX_MODEL_LEN = 2048
EOS_TOKEN_ID = 2
ATTENTION_GAIN = 1.6
LOGIT_STD = 2.5

# Shared by all architectures: head size 32 is the smallest that vLLM's CPU attention accepts.
_HEAD_SIZE = 32
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GQA = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_COMMON,
}
TINY_LLAMA_SIZES = {**_GQA}
_GEMMA = {
    **_GQA,
    "head_dim": _HEAD_SIZE,
    "query_pre_attn_scalar": _HEAD_SIZE,
    "tie_word_embeddings": True,  # vLLM refuses a separate head
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class TinyModel:
    """A tiny model of one architecture.

    Attributes:
        name: name of the model and its folder.
        config: makes the `transformers` configuration.
        why: the feature that it is here for.
        is_trainable: True if `vllm_choreo.lab.train` takes it.
        is_local: True if it has sliding windows.
    """

    name: str
    config: Callable[[], transformers.PretrainedConfig]
    why: str
    is_trainable: bool = True
    is_local: bool = False


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**_GQA, head_dim=_HEAD_SIZE)


def _llama3() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        # Small enough that wavelengths fall on both sides of both limits.
        "original_max_position_embeddings": 256,
    }
    return transformers.LlamaConfig(**_GQA, head_dim=_HEAD_SIZE, rope_parameters=rope)


def _qwen3() -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**_GQA, head_dim=64)


def _yarn() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_MODEL_LEN // 4,
    }
    return transformers.LlamaConfig(**_GQA, head_dim=_HEAD_SIZE, rope_parameters=rope)


def _gemma2() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **_GEMMA,
        attn_logit_softcapping=3.0,
        layer_types=["full_attention"] * _GEMMA["num_hidden_layers"],
        sliding_window=MAX_MODEL_LEN,
    )


def _gemma2_window() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **_GEMMA, attn_logit_softcapping=3.0, layer_types=_ALTERNATING, sliding_window=20
    )


def _gemma3() -> transformers.PretrainedConfig:
    return transformers.Gemma3TextConfig(**_GEMMA, layer_types=_ALTERNATING, sliding_window=12)


def _mistral_window() -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**_GQA, head_dim=_HEAD_SIZE, sliding_window=24)


def _qwen2_window() -> transformers.PretrainedConfig:
    # vLLM takes windows in all layers or in none.
    return transformers.Qwen2Config(
        **_GQA, use_sliding_window=True, sliding_window=16, max_window_layers=0
    )


def _gpt_oss() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": MAX_MODEL_LEN // 4,
    }
    return transformers.GptOssConfig(
        **_GQA,
        head_dim=_HEAD_SIZE,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_ALTERNATING,
        sliding_window=8,
        rope_parameters=rope,
    )


def _stablelm() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return transformers.StableLmConfig(**_GQA, rope_parameters=rope)


def _glm4() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.Glm4Config(**_GQA, head_dim=_HEAD_SIZE, rope_parameters=rope)


def _gpt_neox() -> transformers.PretrainedConfig:
    sizes = {key: value for key, value in _GQA.items() if key != "num_key_value_heads"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.GPTNeoXConfig(**sizes, use_parallel_residual=True, rope_parameters=rope)


def _smollm3() -> transformers.PretrainedConfig:
    sizes = {**_GQA, "num_hidden_layers": 4}
    return transformers.SmolLM3Config(**sizes, no_rope_layers=[1, 0, 1, 0])


def _bloom() -> transformers.PretrainedConfig:
    # Six heads: not a power of two, so that both of ALiBi's slope series are used.
    # vLLM's loader refuses a separate head.
    sizes = {**_COMMON, "tie_word_embeddings": True}
    return transformers.BloomConfig(hidden_size=192, n_layer=3, n_head=6, **sizes)


def _paddleocr_vl() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    # Never run: the model is given text alone.
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    return transformers.PaddleOCRVLConfig(
        text_config={**_GQA, "head_dim": _HEAD_SIZE, "rope_parameters": rope},
        vision_config=vision,
        **_COMMON,
    )


def _ministral3() -> transformers.PretrainedConfig:
    original, beta = 48, 0.1
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": beta,
        "original_max_position_embeddings": original,
    }
    # The name by which vLLM knows the same.
    scaling = {"original_max_position_embeddings": original, "beta": beta}
    return transformers.Ministral3Config(
        **_GQA,
        head_dim=_HEAD_SIZE,
        sliding_window=None,
        rope_parameters=rope,
        llama_4_scaling=scaling,
    )


_MLA = {
    **_GQA,
    "num_key_value_heads": _GQA["num_attention_heads"],
    # The only sizes that vLLM's CPU attention has of MLA.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    # The first layer is dense.
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def _deepseek_v2() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": MAX_MODEL_LEN // 4,
    }
    return transformers.DeepseekV2Config(
        **_MLA,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        rope_parameters=rope,
    )


def _deepseek_v3() -> transformers.PretrainedConfig:
    return transformers.DeepseekV3Config(
        **_MLA,
        q_lora_rank=96,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        num_mtp_layers=0,
        # By which vLLM knows how experts are chosen.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _granite_hybrid() -> transformers.PretrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **{**_GQA, "num_hidden_layers": 4},
        layer_types=["mamba", "attention", "mamba", "attention"],
        position_embedding_type="rope",
        attention_multiplier=_HEAD_SIZE**-0.5,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=192,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=16,
    )


def _lfm2() -> transformers.PretrainedConfig:
    config = transformers.Lfm2Config(
        **{**_GQA, "num_hidden_layers": 4, "tie_word_embeddings": True},
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )
    # By the names that vLLM reads.
    config.block_dim = config.conv_dim = _GQA["hidden_size"]
    config.block_ff_dim = _GQA["intermediate_size"]
    return config


def _qwen3_next() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return transformers.Qwen3NextConfig(
        **{**_GQA, "num_hidden_layers": 4},
        head_dim=64,
        rope_parameters=rope,
        layer_types=["linear_attention", "full_attention"] * 2,
        # vLLM's kernel on CPU takes heads of 128, in bfloat16.
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        # All experts run, so that no choice between them turns on a rounding.
        mlp_only_layers=[0, 1, 2],
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


def _nemotron_h() -> transformers.PretrainedConfig:
    return transformers.NemotronHConfig(
        **{**_GQA, "num_hidden_layers": 4},
        head_dim=_HEAD_SIZE,
        layers_block_type=["mamba", "attention", "mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=16,
    )


def _local(name: str, config: Callable[[], transformers.PretrainedConfig], why: str) -> TinyModel:
    return TinyModel(name, config, why, is_trainable=False, is_local=True)


TINY_MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", _llama, "full rotary, grouped queries"),
        TinyModel("llama3", _llama3, "frequencies scaled per band"),
        TinyModel("yarn", _yarn, "frequencies scaled per band, and attention with them"),
        TinyModel("gemma2", _gemma2, "logit soft cap"),
        TinyModel("qwen3", _qwen3, "norm of queries and keys, head size 64"),
        TinyModel("stablelm", _stablelm, "partial rotary"),
        TinyModel("glm4", _glm4, "partial rotary, interleaved pairs"),
        TinyModel("gpt_neox", _gpt_neox, "partial rotary, parallel residual, vLLM's HF backend"),
        TinyModel("smollm3", _smollm3, "every other layer without positions"),
        TinyModel("bloom", _bloom, "ALiBi", False),
        _local("mistral_window", _mistral_window, "a sliding window in all layers"),
        _local("qwen2_window", _qwen2_window, "the same, biases of queries and keys"),
        _local("gemma2_window", _gemma2_window, "alternating windows, logit soft cap"),
        _local("gemma3", _gemma3, "alternating windows, two rotary bases"),
        _local("gpt_oss", _gpt_oss, "alternating windows, sinks, YaRN, experts"),
        TinyModel("ministral3", _ministral3, "queries scaled by their position", False),
        TinyModel("paddleocr_vl", _paddleocr_vl, "M-RoPE, given text alone", False),
        TinyModel("deepseek_v2", _deepseek_v2, "MLA, YaRN that scales scores, experts", False),
        TinyModel("deepseek_v3", _deepseek_v3, "MLA with compressed queries, experts", False),
    )
}

# Models with layers that have a state in place of keys and values.
HYBRID_MODELS = {
    model.name: model
    for model in (
        TinyModel("granite_hybrid", _granite_hybrid, "Mamba2", False),
        TinyModel("lfm2", _lfm2, "short convolutions", False),
        TinyModel("qwen3_next", _qwen3_next, "gated delta rule, partial rotary", False),
        TinyModel("nemotron_h", _nemotron_h, "Mamba2, attention without positions", False),
    )
}


def _gain(name: str) -> float:
    """Gain of one weight matrix; see the module's docstring."""
    parts = ("q_proj", "k_proj", "query_key_value", "q_b_proj", "kv_a_proj")
    is_attention_input = any(part in name for part in parts)
    return ATTENTION_GAIN if is_attention_input else 1.0


def _draw_weights(model: transformers.PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter of `model` anew, in place."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_head = parameter is model.get_output_embeddings().weight
        if parameter.dim() == 2 and (is_head or "embed" not in name):
            noise *= (LOGIT_STD if is_head else _gain(name)) / math.sqrt(parameter.shape[1])
        elif parameter.dim() == 4:  # of patches of pictures
            noise /= math.sqrt(parameter[0].numel())
        elif parameter.dim() == 3:  # experts, [experts, inputs, outputs]
            noise /= math.sqrt(parameter.shape[1])
        elif name.endswith("sinks"):
            # Of the size of the greatest scores.
            noise += 3.0
        elif parameter.dim() == 1 and name.endswith("weight"):
            # Norms: near one, but not one, so that a norm left out or applied twice shows.
            noise = 1.0 + 0.1 * noise
        elif name.endswith("A_log"):
            # A state forgets a few per cent a token: it carries what is many tokens away.
            noise = 0.3 * noise - 3.0
        elif parameter.dim() == 1:
            noise *= 0.1
        if "word_embeddings_layernorm" in name:
            # With a tied head the token's own embedding must not dominate the residual stream, or
            # every token predicts itself.
            noise *= 0.15
        elif model.config.model_type.startswith("gemma"):
            # The same by a smaller embedding; the final norm, whose weights Gemma adds to one,
            # makes up for it in the logits.
            if is_head:
                noise *= 0.2
            elif name == "model.norm.weight":
                noise += 3.0
        parameter.data.copy_(noise)
    # Tokens that stand for pictures, which are the last ones, are never generated.
    first = getattr(model.config, "image_token_id", VOCAB_SIZE)
    model.get_output_embeddings().weight.data[first:] = 0.0


def make_tokenizer(
    whole_words: bool = False, **special: str
) -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of one word per token, `t<id>`; text is split at white space.

    Args:
        whole_words: whether special tokens are words alone; else `t1` is also found in `t10`.
        special: further special tokens, by the names that processors of pictures know.
    """
    words = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    bos, eos, pad = (
        tokenizers.AddedToken(f"t{token_id}", single_word=whole_words)
        for token_id in (1, EOS_TOKEN_ID, 0)
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=special,
    )


def model_class(config: transformers.PretrainedConfig) -> type[transformers.PreTrainedModel]:
    """Find the class in `transformers` that generates text, from text or from pictures, too."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise KeyError(type(config).__name__)


def make_tiny_model(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    config: transformers.PretrainedConfig | None = None,
) -> Path:
    """Write the tiny model `name` to `folder / name` and return that path.

    The folder holds the configuration, the weights and a tokenizer whose words are `t0 … t511`.
    The same name gives the same weights.

    Args:
        config: configuration of a model that is none of `TINY_MODELS` and `HYBRID_MODELS`.

    Raises:
        KeyError: there is no tiny model of that name.
    """
    config = config or (TINY_MODELS | HYBRID_MODELS)[name].config()
    config.dtype = dtype
    model = model_class(config)(config)
    seed = sum(ord(letter) for letter in name)
    _draw_weights(model, torch.Generator().manual_seed(seed))
    path = folder / name
    model.to(dtype).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path

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


@dataclass(frozen=True)
class TinyModel:
    """One architecture: its name, the `transformers` configuration, and what it is here for."""

    name: str
    config: Callable[[], transformers.PretrainedConfig]
    why: str


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
    # vLLM refuses a separate head, and sliding windows are no part of choreography.
    sizes = {**_GQA, "tie_word_embeddings": True}
    return transformers.Gemma2Config(
        **sizes,
        head_dim=_HEAD_SIZE,
        query_pre_attn_scalar=_HEAD_SIZE,
        attn_logit_softcapping=3.0,
        layer_types=["full_attention"] * sizes["num_hidden_layers"],
        sliding_window=MAX_MODEL_LEN,
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
        TinyModel("bloom", _bloom, "ALiBi"),
    )
}


def _gain(name: str) -> float:
    """The gain of one weight matrix; see the module's docstring."""
    is_attention_input = any(part in name for part in ("q_proj", "k_proj", "query_key_value"))
    return ATTENTION_GAIN if is_attention_input else 1.0


def _draw_weights(model: transformers.PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter of `model` anew, in place."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_head = parameter is model.get_output_embeddings().weight
        if parameter.dim() == 2 and (is_head or "embed" not in name):
            noise *= (LOGIT_STD if is_head else _gain(name)) / math.sqrt(parameter.shape[1])
        elif parameter.dim() == 1 and name.endswith("weight"):
            # Norms: near one, but not one, so that a norm left out or applied twice shows.
            noise = 1.0 + 0.1 * noise
        elif parameter.dim() == 1:
            noise *= 0.1
        if "word_embeddings_layernorm" in name:
            # With a tied head the token's own embedding must not dominate the residual stream, or
            # every token predicts itself.
            noise *= 0.15
        elif model.config.model_type == "gemma2":
            # The same by a smaller embedding; the final norm, whose weights Gemma adds to one,
            # makes up for it in the logits.
            if is_head:
                noise *= 0.2
            elif name == "model.norm.weight":
                noise += 3.0
        parameter.data.copy_(noise)


def _make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One word per token, `t<id>`; text is split at white space."""
    words = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t1", eos_token=f"t{EOS_TOKEN_ID}", pad_token="t0"
    )


def make_tiny_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the tiny model `name` to `folder / name` and return that path.

    The folder holds the configuration, the weights and a tokenizer whose words are `t0 … t511`.
    The same name gives the same weights.

    Raises:
        KeyError: there is no tiny model of that name.
    """
    config = TINY_MODELS[name].config()
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config)
    seed = sum(ord(letter) for letter in name)
    _draw_weights(model, torch.Generator().manual_seed(seed))
    path = folder / name
    model.to(dtype).save_pretrained(path)
    _make_tokenizer().save_pretrained(path)
    return path

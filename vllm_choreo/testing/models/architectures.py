# SPDX-License-Identifier: Apache-2.0
"""Layout of a model of each known architecture in GGUF and in transformers.

An entry of `ARCHITECTURES` is all that the converter has to know of one: the configuration, the
names of tensors, llama.cpp's changes of them, and the tokenizers that such models have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.gguf_fields import ConversionError, Fields

if TYPE_CHECKING:
    import numpy as np

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture` of GGUF.

    Attributes:
        config: makes the content of `config.json`.
        layer_tensors: names of a layer's tensors in GGUF and in transformers.
        tokenizers: `tokenizer.ggml.pre` of the tokenizers that are read with it.
        biased: names in GGUF of the layer's tensors that have a bias beside their weight.
        restore: gives a tensor, by its GGUF name, the form that transformers has it in.
    """

    config: Callable[[Fields], Config]
    layer_tensors: dict[str, str]
    tokenizers: tuple[str, ...]
    biased: tuple[str, ...] = ()
    restore: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, value, config: value

    def transformers_name(self, name: str) -> str:
        """Name of a tensor in transformers.

        Raises:
            ConversionError: this architecture has no tensor of that name.
        """
        if name in _TOP_TENSORS:
            return _TOP_TENSORS[name]
        block, _, rest = name.partition(".")
        layer, _, tensor = rest.partition(".")
        module, _, kind = tensor.partition(".")
        known = kind == "weight" or (kind == "bias" and module in self.biased)
        if block != "blk" or module not in self.layer_tensors or not known:
            raise ConversionError(f"Unknown tensor {name}: not a model of this kind.")
        return f"model.layers.{layer}.{self.layer_tensors[module]}.{kind}"


def find_architecture(fields: Fields) -> Architecture:
    """Find the architecture of a file.

    Raises:
        ConversionError: it is not a known one, has another tokenizer, scales its rotary embedding,
            or is a part of several files.
    """
    name, pre = fields["general.architecture"], fields["tokenizer.ggml.pre"]
    found = ARCHITECTURES.get(name)
    if found is None or pre not in found.tokenizers:
        known = "; ".join(
            f"{each} with tokenizer {' or '.join(one.tokenizers)}"
            for each, one in ARCHITECTURES.items()
        )
        raise ConversionError(
            f"GGUF files of {name} with tokenizer {pre} are not read, only of {known}. "
            "Take the model's folder in the form of transformers instead."
        )
    scaling = fields.get(f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConversionError(
            f"GGUF files whose rotary embedding is scaled ({scaling}) are not read. "
            "Take the model's folder in the form of transformers instead."
        )
    if fields.get("split.count") not in (None, 0, 1):
        raise ConversionError(
            "The GGUF file is one of several: join them first (`llama-gguf-split --merge`)."
        )
    return found


_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SHARED_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _shared_config(fields: Fields, prefix: str) -> Config:
    """Configuration that all architectures have, under the names of transformers."""
    num_heads = fields[f"{prefix}.attention.head_count"]
    hidden_size = fields[f"{prefix}.embedding_length"]
    head_size = fields.get(f"{prefix}.attention.key_length") or hidden_size // num_heads
    rotary_dim = fields.get(f"{prefix}.rope.dimension_count")
    if rotary_dim not in (None, head_size):
        raise ConversionError(
            f"GGUF files that rotate {rotary_dim} of {head_size} numbers of a head are not read. "
            "Take the model's folder in the form of transformers instead."
        )
    return {
        "dtype": "float32",
        "hidden_size": hidden_size,
        "intermediate_size": fields[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": fields[f"{prefix}.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get(f"{prefix}.attention.head_count_kv") or num_heads,
        "head_dim": head_size,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields[f"{prefix}.context_length"],
        "rms_norm_eps": fields.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields[f"{prefix}.rope.freq_base"],
        "attention_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


# ---- Llama ----


def _llama_config(fields: Fields) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        **_shared_config(fields, "llama"),
    }


def _restore_llama(name: str, value: np.ndarray, config: Config) -> np.ndarray:
    if name.endswith("attn_q.weight"):
        return unpermute(value, config["num_attention_heads"])
    if name.endswith("attn_k.weight"):
        return unpermute(value, config["num_key_value_heads"])
    return value


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a query or key projection `[num_heads * head_size, in]` in NeoX order.

    GGUF stores the rows of each head interleaved (row 2i is rotated with row 2i + 1);
    transformers and vLLM rotate row i with row i + head_size / 2.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# ---- Qwen ----


def _qwen2_config(fields: Fields) -> Config:
    shared = _shared_config(fields, "qwen2")
    del shared["attention_bias"]  # queries, keys and values have one, the output has none: always
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        **shared,
    }


def _qwen3_config(fields: Fields) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "use_sliding_window": False,
        **_shared_config(fields, "qwen3"),
    }


# ---- Gemma 3, text ----

# GGUF holds neither: of all Gemma 3 models, every sixth layer has no window, and the others have
# a rotary base of their own.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10000.0


def _gemma3_config(fields: Fields) -> Config:
    shared = _shared_config(fields, "gemma3")
    kinds = [
        "sliding_attention" if (layer + 1) % _GEMMA3_PATTERN else "full_attention"
        for layer in range(shared["num_hidden_layers"])
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        # Right for all sizes but 27B.
        "query_pre_attn_scalar": shared["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "rope_local_base_freq": _GEMMA3_LOCAL_BASE,
        **shared,
    }


def _restore_gemma3(name: str, value: np.ndarray, _: Config) -> np.ndarray:
    # The model multiplies by one plus the weight; llama.cpp stores the sum.
    return value - 1 if name.endswith("norm.weight") else value


_PRE_NORM_TENSORS = {**_SHARED_TENSORS, "ffn_norm": "post_attention_layernorm"}
_QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

ARCHITECTURES = {
    "llama": Architecture(
        _llama_config, _PRE_NORM_TENSORS, ("smollm", "llama-bpe"), restore=_restore_llama
    ),
    "qwen2": Architecture(
        _qwen2_config, _PRE_NORM_TENSORS, ("qwen2",), biased=("attn_q", "attn_k", "attn_v")
    ),
    "qwen3": Architecture(_qwen3_config, {**_PRE_NORM_TENSORS, **_QK_NORM_TENSORS}, ("qwen2",)),
    "gemma3": Architecture(
        _gemma3_config,
        {
            **_SHARED_TENSORS,
            **_QK_NORM_TENSORS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        ("default",),
        restore=_restore_gemma3,
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""Layout of a model of each known architecture in GGUF and in transformers.

An entry of `ARCHITECTURES` is all that the converter has to know of one: the configuration, the
names of tensors, llama.cpp's changes of them, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.gguf_fields import ConversionError, Fields
from vllm_choreo.testing.models.tokenizer import byte_level_bpe, sentence_pieces

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture` of GGUF.

    Attributes:
        pre: `tokenizer.ggml.pre` of the only tokenizer that is read.
        config: makes the content of `config.json`.
        layer_tensors: names of a layer's tensors in GGUF and in transformers.
        restore: gives a tensor, by its GGUF name, the form that transformers has it in.
        tokenizer: makes the tokenizer.
        round_trip_texts: texts that the tokenizer must give back unchanged.
    """

    pre: str
    config: Callable[[Fields], Config]
    layer_tensors: dict[str, str]
    restore: Callable[[str, np.ndarray, Config], np.ndarray]
    tokenizer: Callable[[Fields], tokenizers.Tokenizer]
    round_trip_texts: tuple[str, ...]

    def transformers_name(self, name: str) -> str:
        """Name of a tensor in transformers.

        Raises:
            ConversionError: this architecture has no tensor of that name.
        """
        if name in _TOP_TENSORS:
            return _TOP_TENSORS[name]
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in self.layer_tensors:
            raise ConversionError(f"Unknown tensor {name}: not a model of this kind.")
        return f"model.layers.{parts[1]}.{self.layer_tensors[parts[2]]}.{parts[3]}"


def find_architecture(fields: Fields) -> Architecture:
    """Find the architecture of a file.

    Raises:
        ConversionError: it is not a known one, or has another tokenizer.
    """
    name, pre = fields["general.architecture"], fields["tokenizer.ggml.pre"]
    found = ARCHITECTURES.get(name)
    if found is None or found.pre != pre:
        known = ", ".join(f"{each} with tokenizer {a.pre}" for each, a in ARCHITECTURES.items())
        raise ConversionError(
            f"GGUF files of {name} with tokenizer {pre} are not read, only of {known} "
            "(SmolLM2, Gemma 3 text)."
        )
    return found


_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
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
_ROUND_TRIP_TEXTS = (
    "Ein  Beispiel mit\tUmlauten: äöü, 你好, 🙂\n\n  indented",
    "def f(x):\n    return x**2  # 3.14159",
)


def _shared_config(fields: Fields, prefix: str) -> Config:
    """Configuration that both architectures have, under the names of transformers."""
    return {
        "dtype": "float32",
        "hidden_size": fields[f"{prefix}.embedding_length"],
        "intermediate_size": fields[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": fields[f"{prefix}.block_count"],
        "num_attention_heads": fields[f"{prefix}.attention.head_count"],
        "num_key_value_heads": fields[f"{prefix}.attention.head_count_kv"],
        "max_position_embeddings": fields[f"{prefix}.context_length"],
        "rms_norm_eps": fields.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields[f"{prefix}.rope.freq_base"],
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


# ---- Llama ----


def _llama_config(fields: Fields) -> Config:
    shared = _shared_config(fields, "llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "head_dim": shared["hidden_size"] // shared["num_attention_heads"],
        "hidden_act": "silu",
        "mlp_bias": False,
        **shared,
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


# ---- Gemma 3, text ----

# GGUF holds neither: of all Gemma 3 models, every sixth layer has no window, and the others have
# a rotary base of their own.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10000.0


def _gemma3_config(fields: Fields) -> Config:
    shared = _shared_config(fields, "gemma3")
    head_size = fields["gemma3.attention.key_length"]
    kinds = [
        "sliding_attention" if (layer + 1) % _GEMMA3_PATTERN else "full_attention"
        for layer in range(shared["num_hidden_layers"])
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "head_dim": head_size,
        # Right for all sizes but 27B.
        "query_pre_attn_scalar": head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "rope_local_base_freq": _GEMMA3_LOCAL_BASE,
        **shared,
    }


def _restore_gemma3(name: str, value: np.ndarray, _: Config) -> np.ndarray:
    # The model multiplies by one plus the weight; llama.cpp stores the sum.
    return value - 1 if name.endswith("norm.weight") else value


ARCHITECTURES = {
    "llama": Architecture(
        "smollm",
        _llama_config,
        {**_SHARED_TENSORS, "ffn_norm": "post_attention_layernorm"},
        _restore_llama,
        byte_level_bpe,
        ("<|im_start|>user\nWhat is 1234 + 5678?<|im_end|>\n", *_ROUND_TRIP_TEXTS),
    ),
    "gemma3": Architecture(
        "default",
        _gemma3_config,
        {
            **_SHARED_TENSORS,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _restore_gemma3,
        sentence_pieces,
        ("<start_of_turn>user\nWhat is 1234 + 5678?<end_of_turn>\n", *_ROUND_TRIP_TEXTS),
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small models of transformers, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.testing.models.small_gguf import GGUF_NAMES, byte_alphabet, permute

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Control tokens come last, as in files of Qwen, and behind them what fills the vocabulary up.
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WHOLE, UNUSED = ["<tool_call>"], ["[PAD0]", "[PAD1]"]
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "1 2", "12 3", "' s", "Ċ Ċ", "a b"]
TOKENS = [*byte_alphabet(), *("".join(merge.split()) for merge in MERGES)]
VOCAB = [*TOKENS, *SPECIALS, *WHOLE, *UNUSED]
_TYPES = [1] * len(TOKENS) + [3] * len(SPECIALS) + [4] * len(WHOLE) + [5] * len(UNUSED)
_NAMES = {**GGUF_NAMES, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_model(
    path: Path,
    model: PreTrainedModel,
    pre: str,
    *,
    scaling: str | None = None,
    rotary_dim: int | None = None,
) -> None:
    """Write a model's float32 weights, its sizes and a tokenizer of some words.

    Args:
        model: of an architecture that has the name of GGUF's as its `model_type`.
        pre: name of the tokenizer's way to cut.
        scaling: name of a scaling of the rotary embedding that the file shall claim.
        rotary_dim: numbers of a head that are rotated, as the file shall claim.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    if rotary_dim is not None:
        writer.add_rope_dimension_count(rotary_dim)
    _add_tokenizer(writer, pre)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            is_query = "q_proj" in name
            array = permute(
                array, config.num_attention_heads if is_query else config.num_key_value_heads
            )
        writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, module = name.split(".", 3)
    module, _, kind = module.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def _add_tokenizer(writer: object, pre: str) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types(_TYPES)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(VOCAB.index("<|im_end|>"))
    writer.add_pad_token_id(VOCAB.index("<|endoftext|>"))
    writer.add_bos_token_id(VOCAB.index("<|endoftext|>"))
    if pre == "qwen2":
        writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")

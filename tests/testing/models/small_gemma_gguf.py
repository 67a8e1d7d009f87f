# SPDX-License-Identifier: Apache-2.0
"""A Gemma 3 GGUF file of some kilobytes, written as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 2, 1, 32, 7
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# Found before anything is merged. llama.cpp writes their spaces as spaces.
WHOLE = ["\n", "\n\n", "  ", "   ", "<b>", "\t"]
# Best first; letters come last.
MERGED = ["▁t", "he", "in", "▁a", "an", "▁the", "the", "th", "nd", "▁and", "▁in", "ing", "aa"]
MERGED += ["aaa", "aaaa", "t▁", "e▁", "ba", "ab", "==", "===", "12", "23", "123"]
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz0123=<>._#"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [*CONTROL, *WHOLE, *BYTES, *MERGED, *LETTERS]
TYPES = [3] * len(CONTROL) + [4] * len(WHOLE) + [6] * 256 + [1] * (len(MERGED) + len(LETTERS))
SCORES = [-1000.0] * (len(CONTROL) + len(WHOLE) + 256)
SCORES += [-float(rank) for rank in range(len(MERGED) + len(LETTERS))]

# A layer's tensors: names in GGUF and in transformers, shapes as in transformers.
_LAYER = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_SIZE, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_SIZE, HIDDEN)),
    "attn_q_norm": ("self_attn.q_norm", (HEAD_SIZE,)),
    "attn_k_norm": ("self_attn.k_norm", (HEAD_SIZE,)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_SIZE)),
    "post_attention_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_norm": ("pre_feedforward_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (96, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (96, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, 96)),
    "post_ffw_norm": ("post_feedforward_layernorm", (HIDDEN,)),
}


def expected_weights() -> dict[str, tuple[str, np.ndarray]]:
    """By the name in transformers: the name in GGUF, and random weights, already rounded to what a
    file holds: matrices to Q8_0, and one plus a norm's weight to float32.
    """
    rng = np.random.default_rng(0)
    named = {
        "model.embed_tokens.weight": ("token_embd.weight", (len(TOKENS), HIDDEN)),
        "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    }
    for layer in range(LAYERS):
        for gguf_name, (name, shape) in _LAYER.items():
            of_layer = f"blk.{layer}.{gguf_name}.weight", shape
            named[f"model.layers.{layer}.{name}.weight"] = of_layer
    return {
        name: (
            gguf_name,
            rng.integers(-64, 65, shape).astype(np.float32) / 256
            if len(shape) == 1
            else rng.integers(-127, 128, shape).astype(np.float32) / 64,
        )
        for name, (gguf_name, shape) in named.items()
    }


def write_gguf(path: Path) -> None:
    """The file."""
    import gguf

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_sliding_window(16)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    for name, value in expected_weights().values():
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value + np.float32(1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

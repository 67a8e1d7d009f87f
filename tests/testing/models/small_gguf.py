# SPDX-License-Identifier: Apache-2.0
"""A Llama-architecture GGUF file of a few kilobytes, written as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import gguf

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 4, 2, 16, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE vocabulary."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """NeoX rows to GGUF rows, written row by row: new row 2i + j of a head was row j * half + i."""
    head_size = weight.shape[0] // num_heads
    half = head_size // 2
    rows = [
        weight[head * head_size + j * half + i]
        for head in range(num_heads)
        for i in range(half)
        for j in range(2)
    ]
    return np.stack(rows)


def expected_weights(seed: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Random weights under the names of transformers, already rounded to what Q8_0 holds."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": (96, HIDDEN),
            prefix + "mlp.up_proj.weight": (96, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, 96),
        }
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1
        else rng.integers(-127, 128, shape).astype(np.float32) / 64
        for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, weights: dict[str, np.ndarray], pre: str = "smollm") -> None:
    """A GGUF file with the layout of the shipped one: float32 norms, quantised matrices."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = SPECIALS + byte_alphabet() + ["ab", "Ġab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        add_tensor(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray) -> None:
    """Add one tensor under its GGUF name, rows permuted and matrices in Q8_0, as llama.cpp does."""
    import gguf

    if name.startswith("model.layers."):
        _, _, layer, module = name.removesuffix(".weight").split(".", 3)
        name = f"blk.{layer}.{GGUF_NAMES[module]}.weight"
    else:
        name = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }[name]
    if "attn_q" in name or "attn_k" in name:
        value = permute(value, HEADS if "attn_q" in name else KV_HEADS)
    if value.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, value)


VOCAB_SIZE = len(SPECIALS) + 256 + 2

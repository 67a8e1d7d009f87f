# SPDX-License-Identifier: Apache-2.0
"""A tiny model that reads text byte by byte, so that different words are different tokens."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import transformers

from vllm_choreo.smallmodel.tiny import VOCAB_SIZE, make_tiny_model


def make_byte_model(folder: Path) -> Path:
    """The folder of the model, with ChatML's special tokens."""
    path = make_tiny_model("llama", folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # No text becomes the others, but the model may generate them.
    others = [f"<{i}>" for i in range(VOCAB_SIZE - len(special) - len(letters))]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *others])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[2], additional_special_tokens=special
    )
    fast.save_pretrained(path)
    return path

# SPDX-License-Identifier: Apache-2.0
"""A tiny model that reads text byte by byte, so that different words are different tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import transformers

from tests.chat.chat_templates import Family
from vllm_choreo.testing.models.tiny import VOCAB_SIZE, make_tiny_model

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_byte_model(
    folder: Path, special: Sequence[str] = CHATML, ends: Sequence[str] = CHATML[-1:]
) -> Path:
    """The folder of the model, with these special tokens, of which `ends` end an answer."""
    path = make_tiny_model("llama", folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # No text becomes the others, but the model may generate them.
    others = [f"<{i}>" for i in range(VOCAB_SIZE - len(special) - len(letters))]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *others])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends[0], additional_special_tokens=list(special)
    )
    fast.save_pretrained(path)
    generation = {"eos_token_id": [vocabulary[token] for token in ends]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def make_family_model(folder: Path, family: Family) -> Path:
    """The folder of the model, with the tokens and the chat template of a family."""
    path = make_byte_model(folder, family.tokens, [family.end])
    (path / "chat_template.jinja").write_text(family.template)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": family.bos}))
    return path

# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files as those of the package `tokenizers`.

The loader of GGUF files in transformers (5.19) gives the same weights, but not the same tokens: for
SmolLM digits of other scripts are not split off, for Gemma there is no `<bos>`, and runs of spaces
are not whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.gguf_fields import CONTROL, NORMAL, USER_DEFINED, Fields

if TYPE_CHECKING:
    import tokenizers

# What SentencePiece writes in place of a space.
_SPACE = "▁"


def byte_level_bpe(fields: Fields) -> tokenizers.Tokenizer:
    """Make a byte-level BPE that splits off every digit, like SmolLM's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in fields.token_ids(CONTROL)]
    )
    return tokenizer


def sentence_pieces(fields: Fields) -> tokenizers.Tokenizer:
    """Make SentencePiece's BPE with bytes for unknown characters, like Gemma's.

    SentencePiece merges whichever neighbours make the piece of the greatest score. Here that is a
    list of pairs: all in which a piece can be cut, in order of the pieces' scores. Tokens that were
    defined by the user (runs of spaces and line ends) are found before anything is merged.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens = fields["tokenizer.ggml.tokens"]
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, fields),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    whole = [AddedToken(tokens[i], normalized=False) for i in fields.token_ids(USER_DEFINED)]
    tokenizer.add_tokens(whole)
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in fields.token_ids(CONTROL)]
    )
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _merges(tokens: list[str], fields: Fields) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, best first."""
    scores = fields["tokenizer.ggml.scores"]
    vocab = {tokens[i]: i for i in fields.token_ids(NORMAL)}
    ranked: list[tuple[float, int, int]] = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Content of `tokenizer_config.json`; no chat template where the GGUF file has none."""
    tokens = fields["tokenizer.ggml.tokens"]
    template = fields.get("tokenizer.chat_template")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in names.items()
        },
        **({} if template is None else {"chat_template": template}),
    }

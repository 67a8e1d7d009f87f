# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files as those of the package `tokenizers`.

The loader of GGUF files in transformers (5.19) gives the same weights, but not the same tokens: for
SmolLM digits of other scripts are not split off, for Gemma there is no `<bos>`, and runs of spaces
are not whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.gguf_fields import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    ConversionError,
    Fields,
)

if TYPE_CHECKING:
    import tokenizers

# What SentencePiece writes in place of a space.
_SPACE = "▁"


# Where a byte-level BPE cuts a text before it merges bytes, by `tokenizer.ggml.pre`.
_CUTS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Files of Llama 3 may leave this out, and mean it.
_BEGINS_BY_DEFAULT = ("llama-bpe",)


def make_tokenizer(fields: Fields) -> tokenizers.Tokenizer:
    """Make the tokenizer of a file whose `tokenizer.ggml.pre` is known to its architecture."""
    pre = fields["tokenizer.ggml.pre"]
    tokenizer = _sentence_pieces(fields) if pre == "default" else _byte_level_bpe(fields, pre)
    _add_whole_tokens(tokenizer, fields)
    begins = fields.get("tokenizer.ggml.add_bos_token")
    if begins if begins is not None else pre in _BEGINS_BY_DEFAULT:
        _add_beginning(tokenizer, fields)
    return tokenizer


def _byte_level_bpe(fields: Fields, pre: str) -> tokenizers.Tokenizer:
    """Make a BPE of bytes; SmolLM's splits off every digit, others cut by a regular expression."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 has whole words that its merges do not lead to.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    by_regex = pre in _CUTS
    cut = (
        pre_tokenizers.Split(Regex(_CUTS[pre]), "isolated")
        if by_regex
        else pre_tokenizers.Digits(individual_digits=True)
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(fields: Fields) -> tokenizers.Tokenizer:
    """Make SentencePiece's BPE with bytes for unknown characters, like Gemma's.

    SentencePiece merges whichever neighbours make the piece of the greatest score. Here that is a
    list of pairs: all in which a piece can be cut, in order of the pieces' scores. Tokens that were
    defined by the user (runs of spaces and line ends) are found before anything is merged.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise ConversionError(
            "SentencePiece tokenizers that begin texts with a space are not read."
        )
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
    return tokenizer


def _add_whole_tokens(tokenizer: tokenizers.Tokenizer, fields: Fields) -> None:
    """Add the tokens that are found in a text before anything is merged."""
    from tokenizers import AddedToken

    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer.add_tokens(
        [AddedToken(tokens[i], normalized=False) for i in fields.token_ids(USER_DEFINED)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in fields.token_ids(CONTROL)]
    )


def _add_beginning(tokenizer: tokenizers.Tokenizer, fields: Fields) -> None:
    """Begin every text with the token of the beginning."""
    from tokenizers import processors

    bos = fields["tokenizer.ggml.bos_token_id"]
    token = fields["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, bos)]
    )


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
            if fields.get(f"tokenizer.ggml.{key}_token_id") is not None
        },
        **({} if template is None else {"chat_template": template}),
    }

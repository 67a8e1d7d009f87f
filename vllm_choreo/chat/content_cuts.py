# SPDX-License-Identifier: Apache-2.0
"""Cuts inside a long text, where its content says so: an edit moves those around it alone.

Every place between two tokens has a *weight*: a hash of the tokens right before it, and above that
whether a paragraph or a sentence ends there. With a mean of `2 r` tokens to a piece, a place is a
cut if no other less than `r` tokens away weighs as much:

    weight   3 7 2 5 9 1 4 2 8 3 …        r = 4
                   ^ cut        places from 4 - r + 1 to 4 + r - 1 weigh less

So a cut depends on the `r` tokens on either side of it, and on the few that its hash reads, and on
nothing else: not on what stands before the text, as with cuts that are sought one after the other
(Muthitacharoen et al., SOSP 2001), and not on where it begins. Pieces that come out longer than
`4 r`, where nothing weighs most for long, are cut from their beginning on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that the hash of a place reads.
_HASHED = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = [np.uint64(pow(0xD6E8FEB86659FD93, back, 2**64)) for back in range(_HASHED)]
_SHIFT = np.uint64(32)
_RANK_SHIFT = np.uint64(62)
_SENTENCE, _LINE, _PARAGRAPH = 1, 2, 3
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")

Ranks: TypeAlias = npt.NDArray[np.uint8]
_Weights: TypeAlias = npt.NDArray[np.uint64]


def token_ranks(tokenizer: PreTrainedTokenizerBase) -> Ranks:
    """Rank of each token of a vocabulary: what ends with it.

    Returns:
        uint8 ``[vocab_size]``: 0 nothing, 1 a sentence, 2 a line, 3 a paragraph.
    """
    ids = list(range(len(tokenizer)))
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return np.fromiter((_rank(text) for text in texts), dtype=np.uint8, count=len(texts))


def _rank(text: str) -> int:
    text = text.rstrip(" \t")
    if text.endswith("\n"):
        return _PARAGRAPH if text.endswith("\n\n") else _LINE
    return _SENTENCE if text.endswith(_SENTENCE_ENDS) else 0


def content_cuts(token_ids: Sequence[int], ranks: Ranks, mean_tokens: int) -> list[int]:
    """Find the places at which a text is cut by its content.

    Args:
        token_ids: tokens of the text.
        ranks: rank of each token of the vocabulary, see `token_ranks`.
        mean_tokens: tokens of a piece on average, 2 or more; none has fewer than half of that
            (unless the text has), or more than twice as many.

    Returns:
        The index of the first token of each piece but the first, ascending.
    """
    least, num_tokens = mean_tokens // 2, len(token_ids)
    if num_tokens < 2 * least:
        return []
    weights = _weights(np.asarray(token_ids, dtype=np.int64), ranks)
    chosen = np.flatnonzero(_is_peak(weights, least)) + 1
    legal = chosen[(chosen >= least) & (chosen <= num_tokens - least)]
    cuts: list[int] = []
    for cut in [*legal.tolist(), num_tokens]:
        start = cuts[-1] if cuts else 0
        while cut - start > 4 * least:
            window = weights[start + least - 1 : start + 3 * least - 1]
            start += least + int(np.argmax(window))
            cuts.append(start)
        cuts.append(cut)
    return cuts[:-1]


def _weights(token_ids: npt.NDArray[np.int64], ranks: Ranks) -> _Weights:
    """Weight of the place behind each token."""
    mixed = (token_ids.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    hashes = mixed.copy()
    for back in range(1, min(_HASHED, len(mixed))):
        hashes[back:] += mixed[:-back] * _FACTORS[back]
    hashes ^= hashes >> _SHIFT
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    rank = ranks[np.minimum(token_ids, len(ranks) - 1)].astype(np.uint64)
    # Two tokens that end a line each end a paragraph.
    rank[1:][(rank[1:] == _LINE) & (rank[:-1] >= _LINE)] = _PARAGRAPH
    return (rank << _RANK_SHIFT) | (hashes >> np.uint64(2))


def _is_peak(weights: _Weights, reach: int) -> npt.NDArray[np.bool_]:
    """Return which places weigh more than all before them, and no less than all behind them, that
    are less than `reach` away.
    """
    before = _max_of_last(weights, reach - 1)
    behind = _max_of_last(weights[::-1], reach - 1)[::-1]
    peak: npt.NDArray[np.bool_] = (weights > before) & (weights >= behind)
    return peak


def _max_of_last(weights: _Weights, count: int) -> _Weights:
    """Maximum of the `count` weights before each one, 0 where there are none: a window is made of
    two of half the length that overlap.
    """
    highest, width = weights, 1
    while 2 * width <= count:
        highest = _max_with_earlier(highest, width)
        width *= 2
    if width < count:
        highest = _max_with_earlier(highest, count - width)
    last = np.zeros_like(weights)
    if count > 0:
        last[1:] = highest[:-1]
    return last


def _max_with_earlier(weights: _Weights, distance: int) -> _Weights:
    found = weights.copy()
    np.maximum(weights[distance:], weights[:-distance], out=found[distance:])
    return found

# SPDX-License-Identifier: Apache-2.0
"""Cuts by content: as they are defined, of the sizes that are promised, and moved by edits nearby
alone.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.chat.chat_templates import tokenizer_of
from tests.chat.test_chats import Chats, turn
from vllm_choreo.chat.content_cuts import _weights, content_cuts, token_ranks
from vllm_choreo.chat.parts import MAX_PARTS

_VOCABULARY = 50
# Some tokens end sentences, lines and paragraphs.
_RANKS = np.array(
    [{0: 3, 1: 2, 2: 1, 3: 1}.get(token, 0) for token in range(_VOCABULARY)], np.uint8
)
_TOKENS = st.integers(0, 2**32).map(lambda seed: _text(seed, random.Random(seed).randrange(600)))
_MEANS = st.sampled_from([2, 3, 16, 31, 64])


def _text(seed: int, count: int) -> list[int]:
    """Random tokens, of few kinds in some texts and of one in others."""
    rng = random.Random(seed)
    kinds = rng.choice((1, 2, _VOCABULARY, _VOCABULARY, _VOCABULARY))
    return [rng.randrange(_VOCABULARY - kinds, _VOCABULARY) for _ in range(count)]


def _peaks(tokens: list[int], least: int) -> list[int]:
    """Cuts by their definition: of all places less than `least` away none weighs as much, or only
    later ones do.
    """
    if not tokens:
        return []
    weights = _weights(np.array(tokens), _RANKS).tolist()
    found = []
    for cut in range(least, len(tokens) - least + 1):
        before = weights[max(0, cut - least) : cut - 1]
        behind = weights[cut : cut + least - 1]
        if all(w < weights[cut - 1] for w in before) and all(w <= weights[cut - 1] for w in behind):
            found.append(cut)
    return found


def _pieces(tokens: list[int], cuts: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start:stop]) for start, stop in pairwise((0, *cuts, len(tokens)))]


@settings(deadline=None)
@given(_TOKENS, _MEANS)
@example([], 64)
@example([7] * 500, 16)
def test_cuts_are_as_defined_and_pieces_of_the_promised_sizes(tokens: list[int], mean: int) -> None:
    least = mean // 2
    cuts, peaks = content_cuts(tokens, _RANKS, mean), _peaks(tokens, least)
    assert set(peaks) <= set(cuts)
    assert [token for piece in _pieces(tokens, cuts) for token in piece] == tokens
    sizes = [len(piece) for piece in _pieces(tokens, cuts)]
    assert max(sizes) <= 4 * least or len(tokens) < 2 * least
    assert len(sizes) == 1 or min(sizes) >= least
    # Besides, only what would be too long is cut.
    for start, stop in pairwise((0, *peaks, len(tokens))):
        if stop - start <= 4 * least:
            assert not [cut for cut in cuts if start < cut < stop]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([16, 64]))
def test_an_edit_moves_the_cuts_around_it_alone(seed: int, mean: int) -> None:
    """Tokens are inserted, deleted or replaced: pieces apart from the edit are what they were."""
    rng, least = random.Random(seed), mean // 2
    tokens = _text(rng.randrange(2**32), rng.randrange(600))
    at, gone = rng.randrange(len(tokens) + 1), rng.choice((0, 0, 1, 5))
    added = _text(rng.randrange(2**32), rng.choice((0, 1, 3, 80)))
    tail = tokens[at + gone :]
    edited = tokens[:at] + added + tail
    # A cut knows `least` tokens on either side, and a hash 8 before the first of them.
    safe_before = [0, *(cut for cut in _peaks(tokens, least) if cut + least <= at)][-1]
    behind = [cut - len(tokens) for cut in _peaks(tokens, least) if cut - least - 8 >= at + gone]
    safe_behind = [*behind, 0][0]
    before, after = content_cuts(tokens, _RANKS, mean), content_cuts(edited, _RANKS, mean)
    assert [c for c in before if c <= safe_before] == [c for c in after if c <= safe_before]
    ends = [[c - n for c in cuts if c - n >= safe_behind] for cuts, n in (
        (before, len(tokens)), (after, len(edited)),
    )]  # fmt: skip
    assert ends[0] == ends[1]


def test_a_text_is_found_in_any_other_but_for_its_ends() -> None:
    """Of texts in another order all pieces are found but those across their borders."""
    texts = [[3 + token % 40 for token in _text(seed, 1500)] for seed in range(5)]
    orders = [[0, 1, 2, 3, 4], [3, 1, 4, 0, 2]]
    one, other = (
        _pieces(tokens, content_cuts(tokens, _RANKS, 64))
        for tokens in ([token for n in order for token in texts[n]] for order in orders)
    )
    new = [piece for piece in other if piece not in one]
    assert len(new) <= 2 * len(texts)
    assert sum(map(len, new)) < sum(map(len, other)) / 4


def test_paragraphs_are_preferred_to_lines_and_lines_to_sentences() -> None:
    rng = random.Random(4)
    plain = [rng.randrange(4, _VOCABULARY) for _ in range(400)]
    assert len(set(range(40, 400, 40)) - set(content_cuts(plain, _RANKS, 40))) > 5
    for rank, token in ((1, 2), (2, 1), (3, 0)):
        marked = list(plain)
        for place in range(39, 400, 40):
            marked[place] = token
        assert set(range(40, 400, 40)) <= set(content_cuts(marked, _RANKS, 40)), rank
    mixed = list(plain)
    for place in range(39, 400, 40):
        mixed[place] = 0  # a paragraph, after a line, after a sentence
        mixed[place - 10], mixed[place - 5] = 2, 1
    assert set(range(40, 400, 40)) <= set(content_cuts(mixed, _RANKS, 40))


def test_ranks_of_a_real_vocabulary() -> None:
    tokenizer = tokenizer_of("smollm2")
    ranks = token_ranks(tokenizer)
    assert ranks.shape == (len(tokenizer),)
    text = "One, two. Three\nfour"
    found = {tokenizer.decode([t]): ranks[t] for t in tokenizer.encode(text)}
    assert {key: int(rank) for key, rank in found.items() if rank} == {".": 1, "\n": 2}
    # A paragraph may end with one token or with two.
    tokens = tokenizer.encode("One\n\nTwo")
    assert max(_weights(np.array(tokens), ranks) >> np.uint64(62)) == 3


# -- chats -----------------------------------------------------------------------------------------


def _document(seed: int, num_sentences: int = 30) -> str:
    rng = random.Random(seed)
    words = "river stone garden lamp winter letter bridge copper paper window".split()
    sentences = (" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(num_sentences))
    return " ".join(sentences)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "gemma"])
def test_documents_pasted_into_one_turn_are_found_in_any_order(name: str) -> None:
    chats = Chats(name, cut="content")
    documents = [_document(seed) for seed in range(4)]

    def pieces(order: list[int], question: str) -> list[tuple[int, ...]]:
        text = "\n\n".join([documents[n] for n in order] + [question])
        split = chats.split([turn("user", text)])
        tokens = [t for p in split.parts for t in split.token_ids[p.start : p.stop]]
        assert (*tokens, *split.token_ids[split.header_start :]) == split.token_ids
        return [split.token_ids[part.start : part.stop] for part in split.parts]

    known = set(pieces([0, 1, 2, 3], "Which one?"))
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        found = [piece in known for piece in pieces(order, "And where is the lamp?")]
        # New are the turn's beginning, its end, and what spans two documents.
        assert found.count(False) <= 5 and found.count(True) >= 8, found


def test_answers_are_not_cut_and_parts_are_not_too_many() -> None:
    long = _document(1, 60)
    chat = [turn("user", "Tell."), turn("assistant", long), turn("user", _document(2, 2500))]
    chats = Chats("smollm2", cut="content")
    split = chats.split(chat)
    assert [part.role for part in split.parts].count("assistant") == 1
    assert len(split.parts) <= MAX_PARTS
    assert split.parts[-1].stop == split.header_start

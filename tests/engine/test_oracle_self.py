# SPDX-License-Identifier: Apache-2.0
"""The oracle against plain forward passes, and the tiny models' sensitivity to mistakes.

These tests use no project code and no engine: they say how far the oracle can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.oracle import Encoded, Oracle, Parent, whole
from vllm_choreo.testing.models.tiny import LOGIT_STD, TINY_MODELS

# Differences between two float32 evaluations of the same thing in another order; measured at most
# 2e-5 on these models, and a tenth of what the engine is allowed.
SELF_TOLERANCE = 5e-5


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def oracle(request: pytest.FixtureRequest, tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    """The oracle of each tiny model in turn."""
    return tiny_oracle(request.param)


@pytest.fixture(scope="module", params=sorted({*TINY_MODELS} - {"ministral3"}))
def relative(request: pytest.FixtureRequest, tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    """The same, of models in which distances alone count: a shift changes nothing."""
    return tiny_oracle(request.param)


def _tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (num_tokens,), generator=generator).tolist()


def _difference(left: Encoded, right: Encoded) -> float:
    """Largest difference of any log-probability."""
    return float((left.logprobs() - right.logprobs()).abs().max())


def _chain(oracle: Oracle, pieces: list[list[int]], shift: int = 0) -> list[Encoded]:
    """Each piece encoded with its predecessors as parents, as one text that starts at `shift`."""
    messages: list[Encoded] = []
    for piece in pieces:
        parents = [whole(message, message.position) for message in messages]
        messages.append(oracle.encode(piece, parents, shift + sum(map(len, messages))))
    return messages


def test_chain_equals_plain_forward(oracle: Oracle) -> None:
    pieces = [_tokens(37, 0), _tokens(1, 1), _tokens(64, 2), _tokens(20, 3)]
    messages = _chain(oracle, pieces)
    expected = oracle.plain_logits(sum(pieces, [])).log_softmax(-1)
    actual = torch.cat([message.logprobs() for message in messages])
    torch.testing.assert_close(actual, expected, atol=SELF_TOLERANCE, rtol=0)


def test_moved_parents_equal_plain_forward(relative: Oracle) -> None:
    # Encoded anywhere, seen where the text has them: the rotation must undo the difference.
    # Parents without context of their own, so their keys depend on their own position alone.
    first, second = _tokens(37, 4), _tokens(20, 5)
    parent = relative.encode(first, new_offset=900)
    message = relative.encode(second, [whole(parent, 0)], len(first))
    expected = relative.plain_logits(first + second).log_softmax(-1)[len(first) :]
    torch.testing.assert_close(message.logprobs(), expected, atol=SELF_TOLERANCE, rtol=0)


def test_shift_changes_nothing(relative: Oracle) -> None:
    pieces = [_tokens(33, 6), _tokens(40, 7), _tokens(9, 8)]
    here, there = _chain(relative, pieces), _chain(relative, pieces, shift=777)
    assert all(_difference(a, b) < SELF_TOLERANCE for a, b in zip(here, there, strict=True))
    # The same parents, seen elsewhere than where they were encoded.
    parents, moved = ([whole(here[0], a), whole(here[1], b)] for a, b in ((50, 3), (350, 303)))
    left, right = relative.encode(pieces[2], parents, 90), relative.encode(pieces[2], moved, 390)
    assert _difference(left, right) < SELF_TOLERANCE


def test_permutation_changes_nothing(oracle: Oracle) -> None:
    messages = [oracle.encode(_tokens(length, length), new_offset=7) for length in (12, 45, 30)]
    parents = [whole(m, offset) for m, offset in zip(messages, (40, 0, 100), strict=True)]
    parents.append(Parent(messages[1], 200, 10, 20))
    left = oracle.encode(_tokens(15, 9), parents, 70)
    right = oracle.encode(_tokens(15, 9), parents[::-1], 70)
    assert _difference(left, right) < SELF_TOLERANCE


def test_decode_is_greedy_on_a_plain_forward(oracle: Oracle) -> None:
    parent = oracle.encode(_tokens(20, 10))
    message = oracle.decode(_tokens(5, 11), [whole(parent, 0)], 20, num_tokens=6)
    text = list(parent.token_ids + message.token_ids)
    choices = oracle.plain_logits(text).argmax(-1).tolist()
    assert choices[24:30] == text[25:31]


def test_encodings_are_not_changed_by_their_readers(oracle: Oracle) -> None:
    parent = oracle.encode(_tokens(20, 12))
    before = [key.clone() for key in parent.keys]
    oracle.encode(_tokens(5, 13), [whole(parent, 300)], 100)
    assert all(torch.equal(a, b) for a, b in zip(before, parent.keys, strict=True))


def test_logits_have_a_healthy_spread(oracle: Oracle) -> None:
    logits = oracle.plain_logits(_tokens(100, 14))
    assert 0.7 * LOGIT_STD < float(logits.std()) < 1.3 * LOGIT_STD


# A mistake of the kind an engine could make: what it does to the parents and the new offset.
# The right call is parents of 40 and 25 tokens at 0 and 60, new tokens at 90.
_MISTAKES: dict[str, Callable[[Encoded, Encoded], tuple[list[Parent], int]]] = {
    "one parent one position off": lambda a, b: ([whole(a, 0), whole(b, 61)], 90),
    "new tokens one position off": lambda a, b: ([whole(a, 0), whole(b, 60)], 91),
    "one parent token hidden": lambda a, b: ([whole(a, 0), Parent(b, 60, 0, 24)], 90),
    "one token of padding visible": lambda a, b: (
        [whole(a, 0), whole(b, 60), Parent(a, 85, 0, 1)],
        90,
    ),
    "parents swapped": lambda a, b: ([whole(b, 0), whole(a, 25)], 90),
}


@pytest.mark.parametrize("mistake", sorted(_MISTAKES))
def test_mistakes_are_seen(oracle: Oracle, mistake: str) -> None:
    first, second = oracle.encode(_tokens(40, 15)), oracle.encode(_tokens(25, 16))
    tokens = _tokens(10, 17)
    right = oracle.encode(tokens, [whole(first, 0), whole(second, 60)], 90)
    parents, new_offset = _MISTAKES[mistake](first, second)
    wrong = oracle.encode(tokens, parents, new_offset)
    per_token = (right.logprobs() - wrong.logprobs()).abs().max(dim=-1).values
    assert float(per_token.median()) > 100 * LOGPROB_TOLERANCE
    # At every position of the message on its own: a test that compares one token sees it too.
    assert float(per_token.min()) > 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", sorted(n for n, model in TINY_MODELS.items() if model.is_local))
@pytest.mark.parametrize("wider", [-1, 1])
def test_windows_of_other_sizes_are_seen(
    name: str, wider: int, tiny_oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = tiny_oracle(name)
    parent, tokens = oracle.encode(_tokens(40, 15)), _tokens(10, 17)
    right = oracle.encode(tokens, [whole(parent, 5)], 47)
    monkeypatch.setattr(oracle, "window", oracle.window + wider)
    wrong = oracle.encode(tokens, [whole(parent, 5)], 47)
    assert _difference(right, wrong) > 100 * LOGPROB_TOLERANCE

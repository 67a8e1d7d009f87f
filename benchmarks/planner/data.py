# SPDX-License-Identifier: Apache-2.0
"""Inputs of the workflows: made up, of the lengths of the paper's data sets, from a seed."""

from __future__ import annotations

import random

_WORDS = (
    "the company reported revenue of million in quarter compared with last year while costs rose "
    "because of higher prices for energy and labour and the board expects that demand will remain "
    "strong in all regions except where new rules apply to products which customers return often "
    "screen battery sound quality works well after weeks of use but packaging was damaged shipping"
).split()


def text(seed: str, num_words: int) -> str:
    """Words that look like a sentence of the field, about 1.3 tokens each."""
    chosen = random.Random(seed)
    words = [chosen.choice(_WORDS) for _ in range(num_words)]
    words[:: max(num_words // 8, 1)] = [
        str(chosen.randint(1, 999)) for _ in words[:: max(num_words // 8, 1)]
    ]
    return " ".join(words)


def role(name: str, num_words: int = 40) -> str:
    """A system prompt."""
    return f"You are {name}. " + text(f"role {name}", num_words)

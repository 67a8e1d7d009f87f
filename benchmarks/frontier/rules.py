# SPDX-License-Identifier: Apache-2.0
"""The rules that are compared: what a call is asked to repair, and what that costs.

A budget is a share of the tokens that are read where they were not encoded. Rules that the engine
does not have give runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.engine import BLOCK_SIZE
from vllm_choreo.repair.rules import Seen, chosen_blocks

BUDGETS = (0.03, 0.06, 0.12, 0.25, 0.4, 0.6)
FIRST = "first"
NONE, ALL = "none", "all"  # no rule, but the two ends of every one


@dataclass(frozen=True)
class Given:
    """What rules choose by.

    Attributes:
        lengths: in tokens, of the parents whose context the call changes.
        attention: that the call's header gives each of their tokens, of each parent.
        num_header: tokens of the header.
        seed: of chance.
        num_layers: of the model.
    """

    lengths: tuple[int, ...]
    attention: tuple[np.ndarray, ...]
    num_header: int
    seed: int
    num_layers: int


Runs = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Choice:
    """What is asked of a call.

    Attributes:
        options: of the call; runs count for the parents of `Given.lengths` alone.
        charged: as many tokens through all layers cost as much, the choosing included.
    """

    options: dict[str, Any]
    charged: float


def _ends(given: Given, share: float, at_end: bool) -> Choice:
    counts = [max(1, round(share * length)) for length in given.lengths]
    pairs = zip(counts, given.lengths, strict=True)
    runs = [[(length - count, length) if at_end else (0, count)] for count, length in pairs]
    return Choice({"repair": runs}, sum(counts))


def _first(given: Given, share: float) -> Choice:
    return _ends(given, share, at_end=False)


def _last(given: Given, share: float) -> Choice:
    return _ends(given, share, at_end=True)


def _best(
    given: Given, share: float, score: Callable[[int, tuple[int, int]], float]
) -> tuple[Runs, int]:
    """The blocks of the highest scores, and how many tokens they have."""
    blocks = [
        (number, run)
        for number, length in enumerate(given.lengths)
        for run in Seen(0, length).blocks(BLOCK_SIZE)
    ]
    blocks.sort(key=lambda block: -score(*block))
    runs = chosen_blocks(blocks, share, len(given.lengths))
    return [list(each) for each in runs], sum(stop - start for each in runs for start, stop in each)


def _random(given: Given, share: float) -> Choice:
    rng = random.Random(given.seed)
    runs, count = _best(given, share, lambda number, run: rng.random())
    return Choice({"repair": runs}, count)


def _by_attention(given: Given, share: float) -> Choice:
    def score(number: int, run: tuple[int, int]) -> float:
        return float(given.attention[number][slice(*run)].mean())

    runs, count = _best(given, share, score)
    # The header goes through the layers up to the last one that is watched, once more.
    choosing = given.num_header * (watched(given.num_layers)[-1] + 1) / given.num_layers
    return Choice({"repair": runs}, count + choosing)


def _by_keys(given: Given, share: float) -> Choice:
    num_tokens = sum(given.lengths)
    charged = share * num_tokens + num_tokens * 2 / given.num_layers
    return Choice({"repair": {"share": share, "by": "keys"}}, charged)


def _layers(given: Given, share: float, first: int) -> Choice:
    # What the first of the layers stores does not depend on the context.
    count = max(2, round(share * given.num_layers))
    stop = min(given.num_layers, first + count)
    start = max(0, stop - count)
    return Choice({"layers": (start, stop)}, sum(given.lengths) * count / given.num_layers)


def _first_layers(given: Given, share: float) -> Choice:
    return _layers(given, share, 0)


def _middle_layers(given: Given, share: float) -> Choice:
    return _layers(given, share, given.num_layers // 3)


def watched(num_layers: int) -> tuple[int, ...]:
    """The middle layers whose attention counts."""
    return tuple(num_layers * part // 10 for part in (4, 5, 6))


RULES: dict[str, Callable[[Given, float], Choice]] = {
    FIRST: _first,
    "last": _last,
    "random": _random,
    "attention": _by_attention,
    "keys": _by_keys,
    "first layers": _first_layers,
    "middle layers": _middle_layers,
}


def choices(given: Given, budgets: Sequence[float]) -> dict[tuple[str, float], Choice]:
    """By rule and budget."""
    return {(name, share): rule(given, share) for name, rule in RULES.items() for share in budgets}


def hidden_layers(num_layers: int, budgets: Sequence[float]) -> list[int]:
    """The layers whose hidden states messages must keep for all of that."""
    given = Given((1,), (np.zeros(1),), 1, 0, num_layers)
    asked = [rule(given, share) for rule in (_first_layers, _middle_layers) for share in budgets]
    return sorted({choice.options["layers"][0] for choice in asked} - {0})

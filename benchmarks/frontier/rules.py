# SPDX-License-Identifier: Apache-2.0
"""The rules that are compared: what a call is asked to repair, and what that costs.

A budget is a share of the tokens that are read where they were not encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE
from vllm_choreo.repair.layers import middle_layers
from vllm_choreo.repair.rules import Seen, rule_of

BUDGETS = (0.03, 0.06, 0.12, 0.25, 0.4, 0.6)
FIRST = "first"
NONE, ALL = "none", "all"  # no rule, but the two ends of every one


@dataclass(frozen=True)
class Given:
    """What rules choose by.

    Attributes:
        lengths: in tokens, of the parents whose context the call changes.
        num_header: tokens of the header.
        seed: of chance.
        num_layers: of the model.
    """

    lengths: tuple[int, ...]
    num_header: int
    seed: int
    num_layers: int


@dataclass(frozen=True)
class Choice:
    """What is asked of a call.

    Attributes:
        options: of the call; runs count for the parents of `Given.lengths` alone.
        layers: share of the layers through which repaired tokens are run.
        choosing: as many tokens through all layers cost as much as choosing did.
    """

    options: dict[str, Any]
    layers: float = 1.0
    choosing: float = 0.0

    def charged(self, num_repaired: int) -> float:
        """As many tokens through all layers cost as much as all of it."""
        return num_repaired * self.layers + self.choosing


def _ends(given: Given, share: float, at_end: bool) -> Choice:
    counts = [max(1, round(share * length)) for length in given.lengths]
    pairs = zip(counts, given.lengths, strict=True)
    runs = [[(length - count, length) if at_end else (0, count)] for count, length in pairs]
    return Choice({"repair": runs})


def _first(given: Given, share: float) -> Choice:
    return _ends(given, share, at_end=False)


def _last(given: Given, share: float) -> Choice:
    return _ends(given, share, at_end=True)


def _random(given: Given, share: float) -> Choice:
    rule = rule_of({"share": share, "by": "random", "seed": given.seed})
    runs = rule.runs([Seen(0, length) for length in given.lengths], BLOCK_SIZE)
    return Choice({"repair": [list(each) for each in runs]})


def _by_attention(given: Given, share: float) -> Choice:
    # The header goes through the layers up to the last one that counts, once more.
    through = (middle_layers(given.num_layers)[-1] + 1) / given.num_layers
    rule = {"share": share, "by": "attention"}
    return Choice({"repair": rule}, choosing=given.num_header * through)


def _layers(given: Given, share: float, first: int) -> Choice:
    # What the first of the layers stores does not depend on the context.
    count = max(2, round(share * given.num_layers))
    stop = min(given.num_layers, first + count)
    start = max(0, stop - count)
    return Choice({"layers": (start, stop)}, layers=count / given.num_layers)


def _first_layers(given: Given, share: float) -> Choice:
    return _layers(given, share, 0)


def _middle_layers(given: Given, share: float) -> Choice:
    return _layers(given, share, given.num_layers // 3)


RULES: dict[str, Callable[[Given, float], Choice]] = {
    FIRST: _first,
    "last": _last,
    "random": _random,
    "attention": _by_attention,
    "first layers": _first_layers,
    "middle layers": _middle_layers,
}


def choices(given: Given, budgets: Sequence[float]) -> dict[tuple[str, float], Choice]:
    """By rule and budget."""
    return {(name, share): rule(given, share) for name, rule in RULES.items() for share in budgets}


def hidden_layers(num_layers: int, budgets: Sequence[float]) -> list[int]:
    """The layers whose hidden states messages must keep for all of that."""
    given = Given((1,), 1, 0, num_layers)
    asked = [rule(given, share) for rule in (_first_layers, _middle_layers) for share in budgets]
    return sorted({choice.options["layers"][0] for choice in asked} - {0})

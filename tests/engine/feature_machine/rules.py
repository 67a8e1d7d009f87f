# SPDX-License-Identifier: Apache-2.0
"""Rules of repair for the calls of a program, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.engine.feature_machine.program import Read

KINDS = ("given", "first", "share", "attention", "layers", "reweight")
_LAYERS: tuple[Any, ...] = ((1, 3), (1, 2), (2, 3), (0, 2), (0, 1), ((0, 1), (2, 3)), (0, 3))
# How many tokens messages have at least, by name.
Lengths = Mapping[str, int]
Runs = tuple[tuple[int, int], ...]


def rule(rng: random.Random, kind: str, reads: Sequence[Read], lengths: Lengths) -> Any:
    """A rule of a kind for a call that reads these parents."""
    if kind == "first":
        return rng.choice(("all", f"first:{rng.choice((1, 7, 32, 40))}"))
    if kind == "share":
        return {"share": rng.choice((0.3, 0.6)), "by": "random", "seed": rng.randrange(9)}
    if kind == "attention":
        return {"share": rng.choice((0.3, 0.6, 1.0)), "by": "attention"}
    if kind == "layers":
        layers = rng.choice(_LAYERS)
        return {"layers": [list(one) if isinstance(one, tuple) else one for one in layers]}
    if kind == "reweight":
        return {"reweight": [rng.choice((0.7, 0.9, 1.2)), rng.choice((0.9, 1.0, 1.1))]}
    return tuple(_runs(rng, read, lengths) for read in reads)


def first_tokens(rng: random.Random, reads: Sequence[Read], lengths: Lengths) -> Any:
    """A rule for models with states, in which nothing else is repaired."""
    if rng.random() < 0.5:
        return rule(rng, "first", reads, lengths)
    counts = [lengths.get(read.name, 1) for read in reads]
    chosen = [rng.choice((0, rng.randint(1, max(count, 1)))) for count in counts]
    return tuple(((0, count),) if count else () for count in chosen)


def short_runs(rng: random.Random, read: Read, lengths: Lengths) -> Runs:
    """A run or two of few tokens, so that most of a block is copied; or none."""
    count = lengths.get(read.name, 1)
    runs, stop = [], 0
    for _ in range(rng.choice((0, 1, 1, 2))):
        start = stop + rng.choice((1, 1, 33, 40))
        stop = start + rng.choice((5, 7, 30))
        runs.append((start, stop))
    return tuple((start, stop) for start, stop in runs if stop <= count)


def _runs(rng: random.Random, read: Read, lengths: Lengths) -> Runs:
    """Runs of one parent; not behind its end, but for a few."""
    last = lengths.get(read.name, 1) if read.stop is None else read.stop
    count = last - (read.start or 0)
    if count < 1 or rng.random() < 0.3:
        return ()
    if rng.random() < 0.03:
        return ((0, count + 60),)
    ends = sorted(rng.sample(range(count + 1), min(count + 1, rng.choice((2, 2, 4)))))
    runs = [pair for pair in zip(ends[::2], ends[1::2], strict=False) if pair[0] < pair[1]]
    return tuple(runs)

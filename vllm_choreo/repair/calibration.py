# SPDX-License-Identifier: Apache-2.0
"""Masks made of measured calls: what repairing each block gains, and which blocks to repair.

Each call is measured as it is, and some times with blocks repaired that are drawn at random: a
factorial design, in which every measurement tells of all blocks at once. Gains are taken to add up:
ridge regression of what a call gained on what was repaired for it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Weight of "nothing is gained" in a regression, in measurements.
RIDGE = 1.0


class Key(NamedTuple):
    """Block `block` of the parents of one role, for calls of one role."""

    role: str
    parent: str
    block: int


class ReadParent(NamedTuple):
    """A parent of a measured call.

    Attributes:
        role: role of the parent.
        num_tokens: tokens that the call sees of it.
        is_right: whether it was encoded with what the call reads before it, and needs no repair.
    """

    role: str
    num_tokens: int
    is_right: bool


class Trial(NamedTuple):
    """A call with blocks repaired: `gain` is by how many nats it came nearer to the text."""

    repaired: frozenset[Key]
    gain: float


def keys_of(
    role: str, parents: Sequence[ReadParent], block: int, num_blocks: int
) -> dict[Key, int]:
    """Blocks that a call can repair, and how many tokens each takes."""
    tokens: dict[Key, int] = defaultdict(int)
    for parent in parents:
        if parent.is_right:
            continue
        for start in range(0, parent.num_tokens, block):
            number = min(start // block, num_blocks - 1)
            tokens[Key(role, parent.role, number)] += min(block, parent.num_tokens - start)
    return dict(tokens)


def drawn(keys: Iterable[Key], rng: random.Random) -> frozenset[Key]:
    """Draw each key with probability one half."""
    return frozenset(key for key in sorted(keys) if rng.random() < 0.5)


def gains_of(trials: Sequence[Trial]) -> dict[Key, float]:
    """Gain of repairing each block, in nats per call.

    Calls of different roles do not tell of one another: their blocks are never repaired together.
    """
    by_role: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        for role in {key.role for key in trial.repaired}:
            by_role[role].append(trial)
    gains: dict[Key, float] = {}
    for of_role in by_role.values():
        gains |= _regressed(of_role)
    return gains


def _regressed(trials: Sequence[Trial]) -> dict[Key, float]:
    keys = sorted({key for trial in trials for key in trial.repaired})
    is_in = np.array([[key in trial.repaired for key in keys] for trial in trials], dtype=float)
    gained = np.array([trial.gain for trial in trials])
    found = np.linalg.solve(is_in.T @ is_in + RIDGE * np.eye(len(keys)), is_in.T @ gained)
    return dict(zip(keys, found.tolist(), strict=True))


def select_within_budget(
    gains: Mapping[Key, float], tokens: Mapping[Key, int], counts: Mapping[Key, int], budget: float
) -> frozenset[Key]:
    """Select blocks to repair within a budget: those first that gain most per token.

    Args:
        gains: nats per call; blocks that gain nothing are left.
        tokens: tokens that each takes, in all calls together.
        counts: number of calls that can repair it.
        budget: tokens to repair at most, in all calls together.
    """
    useful = [key for key in tokens if gains.get(key, 0.0) > 0]
    useful.sort(key=lambda key: (-gains[key] * counts[key] / tokens[key], key))
    chosen = set()
    for key in useful:
        if tokens[key] <= budget:
            budget -= tokens[key]
            chosen.add(key)
    return frozenset(chosen)


def masks_of(
    keys: Iterable[Key], readers: Mapping[str, Iterable[str]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Blocks by role of the call and of the parent; `readers` names all of these roles."""
    masks: dict[str, dict[str, tuple[int, ...]]] = {
        role: dict.fromkeys(sorted(parents), ()) for role, parents in sorted(readers.items())
    }
    for key in sorted(keys):
        masks[key.role][key.parent] += (key.block,)
    return masks

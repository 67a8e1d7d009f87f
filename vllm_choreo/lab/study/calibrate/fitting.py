# SPDX-License-Identifier: Apache-2.0
"""Fit to the first half of the runs: what each block buys, and what candidates should buy."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.calibrate.measure import (
    BLOCK,
    NUM_BLOCKS,
    MeasuredReplay,
    Replays,
    distinct,
)
from vllm_choreo.repair.calibration import (
    Key,
    ReadParent,
    Trial,
    drawn,
    gains_of,
    keys_of,
    masks_of,
    select_within_budget,
)

if TYPE_CHECKING:
    from vllm import LLM

# How often each run is replayed with blocks drawn at random.
DRAWS = 3


@dataclass
class Fit:
    """Findings on some runs.

    Attributes:
        gains: nats that a block gains per call that repairs it.
        tokens, counts: tokens of each block, in all calls together (of those that read the same,
            once), and how many calls can repair it.
        readers: roles of calls that read, and of the messages that they read.
        kl: KL to the text without repair, in nats, summed over the tokens.
        num_tokens, num_reused: tokens that were generated, and tokens that were read.
    """

    gains: dict[Key, float] = field(default_factory=dict)
    tokens: Counter[Key] = field(default_factory=Counter)
    counts: Counter[Key] = field(default_factory=Counter)
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    kl: float = 0.0
    num_tokens: int = 0
    num_reused: int = 0

    def add(self, measured: MeasuredReplay) -> None:
        """Count a run that was replayed without repair."""
        self.kl += sum(measured.kl)
        self.num_tokens += measured.num_tokens
        self.num_reused += measured.num_reused
        for call in measured.read:
            self.readers[call.role] |= {parent.role for parent in call.parents}
            self.counts.update(keys_of(call.role, call.parents, BLOCK, NUM_BLOCKS).keys())
        for call in distinct(measured.read):
            self.tokens.update(keys_of(call.role, call.parents, BLOCK, NUM_BLOCKS))

    def masks(self, budget: float) -> dict[str, dict[str, tuple[int, ...]]]:
        """Masks of a policy; the budget is a share of the reused tokens."""
        keys = select_within_budget(self.gains, self.tokens, self.counts, budget * self.num_reused)
        return masks_of(keys, self.readers)

    def predicted(self, share_of: Callable[[Key], float]) -> float:
        """KL to the text in nats per token, if `share_of` each block is repaired."""
        regained = sum(share_of(key) * gain * self.counts[key] for key, gain in self.gains.items())
        return max(0.0, self.kl - regained) / self.num_tokens


def fit(llm: LLM, tasks: Sequence[Task], seed: int, on_replay: Callable[[], None]) -> Fit:
    """Replay runs, and find what each block buys.

    Args:
        tasks: tasks with recorded runs.
        seed: random seed of the blocks that are drawn.
        on_replay: called after each replay; there are `2 + DRAWS` of each run.

    Raises:
        ChoreoError: a run cannot be replayed.
    """
    found, trials, rng = Fit(), [], random.Random(seed)

    def choose(role: str, parents: Sequence[ReadParent]) -> frozenset[Key]:
        return drawn(keys_of(role, parents, BLOCK, NUM_BLOCKS), rng)

    for task in tasks:
        replays = Replays(llm, task)
        on_replay()
        plain = replays.measure()
        found.add(plain)
        on_replay()
        for _ in range(DRAWS):
            measured = replays.measure(choose=choose)
            gained = zip(measured.calls, plain.kl, measured.kl, strict=True)
            trials += [
                Trial(call.chosen, before - after) for call, before, after in gained if call.chosen
            ]
            on_replay()
    found.gains = gains_of(trials)
    return found

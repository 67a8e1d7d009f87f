# SPDX-License-Identifier: Apache-2.0
"""Random choreographies for the prototypes, and what their models and oracles share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

VOCAB_SIZE = 50
# float64, sums of some hundred terms of size one; the prototypes were found within 1e-13.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Parent:
    """Tokens `start … stop - 1` of message `number`, the first of them seen at `offset`."""

    number: int
    start: int
    stop: int
    offset: int

    def seen(self) -> torch.Tensor:
        """int64 `[stop - start]`: the positions at which the tokens are seen."""
        return torch.arange(self.stop - self.start) + self.offset


@dataclass(frozen=True)
class Call:
    """New tokens, the first at `new_offset`, which attend to themselves and to all parents."""

    tokens: tuple[int, ...]
    parents: tuple[Parent, ...]
    new_offset: int

    def positions(self) -> torch.Tensor:
        """int64 `[num_tokens]`: where the new tokens sit."""
        return torch.arange(len(self.tokens)) + self.new_offset


def draw_calls(seed: int, num_calls: int = 10, max_length: int = 13) -> list[Call]:
    """Calls on earlier ones: parts, gaps, overlaps, duplicates, parents to the right."""
    rng = random.Random(seed)
    calls: list[Call] = []
    for _ in range(num_calls):
        parents = []
        for _ in range(rng.randint(0, min(3, len(calls)))):
            number = rng.randrange(len(calls))
            length = len(calls[number].tokens)
            start = rng.randrange(length) if rng.random() < 0.3 else 0
            parents.append(Parent(number, start, length, rng.randint(0, 40)))
        length = rng.randint(1, max_length)
        tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
        calls.append(Call(tokens, tuple(parents), rng.randint(0, 40)))
    return calls


class Weights:
    """Random matrices, the same for the same seed, scaled for inputs of size one."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, num_inputs: int, *outputs: int, gain: float = 1.0) -> torch.Tensor:
        """float64 `[num_inputs, *outputs]`."""
        shape = (num_inputs, *outputs)
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return gain * drawn / math.sqrt(num_inputs)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Root mean square of one over the last dimension."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring components of `[tokens, heads, rotary_dim]`, at `[tokens]`."""
    half = x.shape[-1] // 2
    inv_freq = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None, None] * inv_freq
    turned = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

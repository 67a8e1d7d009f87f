# SPDX-License-Identifier: Apache-2.0
"""Transitions, which tokens do to any state: `A` of `S -> A S + B`, kept beside it.

With the state `S_in` with which a message began and the one behind it, `S_out`, it follows what
the message does to another state: `S_out + A (S - S_in)`. So a state that is what it was gives
what it gave, to the last bit.

    Mamba2            A is one number per head: the product of all tokens' gates
    gated delta rule  A is a matrix per head: the product of `exp(g) (I - beta k k^T)`
    convolution       it remembers its last inputs, and nothing is kept beside them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Tokens of a delta rule that are multiplied as one triangular system.
_CHUNK = 64


@dataclass(frozen=True)
class FollowedTokens:
    """Tokens of a step, or of a part of it, whose effect on their requests' states is followed.

    Attributes:
        states: numbers of the states, one per request.
        starts, stops: the rows of each request's tokens in the batch.
    """

    states: Sequence[int]
    starts: Sequence[int]
    stops: Sequence[int]


class Transitions(Protocol):
    """The `A` of all states of a layer.

    Attributes:
        tensor: float32 `[num_states, ...]`.
    """

    tensor: torch.Tensor

    def reset(self, state: int) -> None:
        """Note that nothing has been done to a state."""

    def applied(self, state: int, memory: torch.Tensor) -> torch.Tensor:
        """Memory after what was done to a state, but for what was added to it.

        Args:
            memory: float32, as one state's.
        """


class Decays:
    """Transitions of Mamba2: logarithms of the products of gates, `[num_states, num_heads]`."""

    def __init__(self, num_states: int, num_heads: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_states, num_heads, device=device)

    def reset(self, state: int) -> None:
        self.tensor[state] = 0

    def applied(self, state: int, memory: torch.Tensor) -> torch.Tensor:
        return self.tensor[state].exp()[:, None, None] * memory

    def follow(self, tokens: FollowedTokens, log_gates: torch.Tensor) -> None:
        """Take in what tokens do.

        Args:
            log_gates: float32 `[num_tokens, num_heads]`, of the batch.
        """
        for state, start, stop in zip(tokens.states, tokens.starts, tokens.stops, strict=True):
            self.tensor[state] += log_gates[start:stop].sum(0)


class DeltaRules:
    """Transitions of gated delta rules: products, `[num_states, num_heads, key_size, key_size]`."""

    def __init__(
        self, num_states: int, num_heads: int, key_size: int, device: torch.device
    ) -> None:
        self.tensor = torch.zeros(num_states, num_heads, key_size, key_size, device=device)

    def reset(self, state: int) -> None:
        self.tensor[state] = torch.eye(self.tensor.shape[-1], device=self.tensor.device)

    def applied(self, state: int, memory: torch.Tensor) -> torch.Tensor:
        # vLLM's kernels on CPU have keys in rows, whatever the shape of the cache says.
        by_key = memory.reshape(*self.tensor.shape[1:3], -1)
        return (self.tensor[state] @ by_key).view_as(memory)

    def follow(
        self,
        tokens: FollowedTokens,
        keys: torch.Tensor,
        log_decays: torch.Tensor,
        betas: torch.Tensor,
    ) -> None:
        """Take in what tokens do.

        Args:
            keys: float32 `[num_heads, num_tokens, key_size]`, of the batch, of length 1.
            log_decays, betas: float32 `[num_heads, num_tokens]`, likewise.
        """
        decoding: list[tuple[int, int]] = []  # requests of one token are taken together
        for state, start, stop in zip(tokens.states, tokens.starts, tokens.stops, strict=True):
            if stop - start == 1:
                decoding.append((state, start))
                continue
            for first in range(start, stop, _CHUNK):
                rows = slice(first, min(first + _CHUNK, stop))
                self.tensor[state] = _changed(
                    self.tensor[state], keys[:, rows], log_decays[:, rows], betas[:, rows]
                )
        if decoding:
            states, at = torch.tensor(decoding, device=keys.device).t()
            operands = (keys[:, at, None], log_decays[:, at, None], betas[:, at, None])
            by_request = (operand.transpose(0, 1) for operand in operands)
            self.tensor[states] = _changed(self.tensor[states], *by_request)


def _changed(
    product: torch.Tensor, keys: torch.Tensor, log_decays: torch.Tensor, betas: torch.Tensor
) -> torch.Tensor:
    """Product of all tokens' `exp(g) (I - beta k k^T)`, the later ones to the left, and `product`.

    With `u_t = beta_t (k_t - sum over s < t of (k_t k_s) u_s)` it is `I - sum of k_t u_t^T`, times
    all decays, which are numbers.

    Args:
        product: float32 `[..., key_size, key_size]`.
        keys: float32 `[..., num_tokens, key_size]`.
        log_decays, betas: float32 `[..., num_tokens]`.
    """
    scaled = betas[..., None] * keys
    lower = (scaled @ keys.mT).tril(-1)
    u = torch.linalg.solve_triangular(lower, scaled, upper=False, unitriangular=True)
    return log_decays.sum(-1).exp()[..., None, None] * (product - keys.mT @ (u @ product))

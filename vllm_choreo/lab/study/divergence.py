# SPDX-License-Identifier: Apache-2.0
"""Divergence of a model's distributions, token by token, from those that it has reading text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.engine import captured_logprobs
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message

if TYPE_CHECKING:
    from vllm import SamplingParams


class Measured(FacadeWrapper):
    """A `Facade` that hands calls to `c` and keeps the distributions of their generated tokens.

    Args:
        c: a facade on an engine in this process that forces tokens; each call that generates says
            which (`Replay`). Any other raises ChoreoError.

    Attributes:
        distributions: natural log-probabilities of each call that generated, in order, float32
            [num_generated, vocab_size].
    """

    def __init__(self, c: Facade) -> None:
        super().__init__(c)
        self.distributions: list[np.ndarray] = []

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        names = [f"{id(self)}/{len(self.distributions) + i}" for i in range(len(calls))]
        try:
            messages = super()._decode(
                [
                    {**call, "sampling_params": _keeping(call["sampling_params"], name)}
                    for call, name in zip(calls, names, strict=True)
                ]
            )
        finally:
            found = [captured_logprobs.take(name) for name in names]
        for message, said in zip(messages, found, strict=True):
            if len(said) != len(message.generated_token_ids):
                raise ChoreoError(
                    "distributions are kept by an engine in this process that forces tokens: set "
                    "VLLM_ENABLE_V1_MULTIPROCESSING=0, and start it with logits_processors="
                    '["vllm_choreo.engine.worker.forced:ForcedTokens"]',
                    parameter="llm",
                )
        self.distributions += found
        return messages


def _keeping(params: SamplingParams, name: str) -> SamplingParams:
    """Sampling parameters under which a call's distributions are kept, by `name`."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), **captured_logprobs.expect(name)}
    return params


def kl_per_token(base: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compute KL(base || other) at each token, in nats.

    Args:
        base, other: natural log-probabilities, [num_tokens, vocab_size].

    Returns:
        float64 [num_tokens].
    """
    base64: np.ndarray = base.astype(np.float64)
    other64: np.ndarray = other.astype(np.float64)
    # Where the base says never, nothing is lost, whatever the other says.
    difference: np.ndarray = np.where(base64 > -np.inf, base64 - other64, 0.0)
    kl: np.ndarray = (np.exp(base64) * difference).sum(axis=1)
    return kl


def divergence(base: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[float, int]:
    """Sum KL(base || other), in nats, over all tokens of all calls; return it and their number."""
    kl = [kl_per_token(*pair) for pair in zip(base, other, strict=True)]
    return float(sum(values.sum() for values in kl)), sum(map(len, kl))


def same_calls(
    roles: Sequence[str | None], base: Sequence[np.ndarray], other: Sequence[np.ndarray]
) -> dict[str, tuple[int, int]]:
    """Count the calls in which both find the same token likeliest at every place.

    Args:
        roles: role of the message that each call generated.
        base, other: log-probabilities of each call, [num_tokens, vocab_size].

    Returns:
        (number of such calls, number of calls) by role; "" is the role of those without one.
    """
    found: dict[str, tuple[int, int]] = {}
    for role, one, two in zip(roles, base, other, strict=True):
        same, compared = found.get(role or "", (0, 0))
        is_same = bool((one.argmax(axis=1) == two.argmax(axis=1)).all())
        found[role or ""] = (same + is_same, compared + 1)
    return found

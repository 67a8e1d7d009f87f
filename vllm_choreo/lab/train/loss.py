# SPDX-License-Identifier: Apache-2.0
"""Losses of training: the surprise at recorded outputs, and the distance to the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.packing import Packing, pack_as_text
from vllm_choreo.trained_adapter import uses_adapter

_LEAST = 1e-7  # of the probability of all other tokens: float32 knows no less beside 1


@dataclass(frozen=True, eq=False)
class Teacher:
    """The text's distribution at every trained token: the likeliest tokens, and the rest as one.

    Attributes:
        token_ids: int64 `[num_trained, k]`.
        logprobs: float32 `[num_trained, k]`, natural.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def concat(cls, teachers: Sequence[Teacher]) -> Teacher:
        """Concatenate the rows of teachers, cut to the smallest `k`."""
        k = min(teacher.token_ids.shape[1] for teacher in teachers)
        return cls(
            torch.cat([teacher.token_ids[:, :k] for teacher in teachers]),
            torch.cat([teacher.logprobs[:, :k] for teacher in teachers]),
        )

    def to(self, device: torch.device | str) -> Teacher:
        """The same teacher on a device."""
        return Teacher(self.token_ids.to(device), self.logprobs.to(device))


def adapted_calls(packing: Packing, placement: str) -> tuple[bool, ...]:
    """Return for each call whether an adapter of this placement encodes it; see `uses_adapter`.

    Raises:
        ChoreoError: no such placement.
    """
    return tuple(uses_adapter(placement, call.is_decode) for call in packing.calls)


def text_logprobs(model: PackedModel, packing: Packing) -> torch.Tensor:
    """Log-probabilities at every trained token, by the frozen model that reads text unadapted.

    Returns:
        Float32 `[num_trained, vocab_size]`, without gradient; the rows of `trained_rows`.
    """
    text = pack_as_text(packing)
    none = [False] * len(text.calls) if model.has_adapter else None
    was_training = model.model.training
    model.model.eval()
    try:
        with torch.no_grad():
            return model.logits(text, text.trained_rows, none).float().log_softmax(-1)
    finally:
        model.model.train(was_training)


def trained_logprobs(
    model: PackedModel, packing: Packing, adapted: Sequence[bool] | None = None
) -> torch.Tensor:
    """Log-probabilities at every trained token, choreographed: float32 `[num_trained, vocab]`."""
    return model.logits(packing, packing.trained_rows, adapted).float().log_softmax(-1)


def cross_entropy(logprobs: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Mean surprise at the recorded tokens, in nats per token."""
    return F.nll_loss(logprobs, packing.trained_ids)


def divergence(logprobs: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """KL(text || choreographed), nats per token, over the whole vocabulary."""
    return F.kl_div(logprobs, text, reduction="batchmean", log_target=True)


def likeliest_divergence(logprobs: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """`divergence` where all but the teacher's tokens count as one: nats per token.

    It is at most the one over the whole vocabulary, and equal to it if the teacher has all tokens.
    """
    found = logprobs.gather(1, teacher.token_ids)
    text = teacher.logprobs.exp()
    rest_text, rest = ((1 - p.sum(1)).clamp_min(_LEAST) for p in (text, found.exp()))
    each = (text * (teacher.logprobs - found)).sum(1) + rest_text * (rest_text / rest).log()
    return each.mean()

# SPDX-License-Identifier: Apache-2.0
"""What training makes small: the surprise at recorded outputs, and the distance to the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_choreo.errors import ChoreoError
from vllm_choreo.train.forward import PackedModel
from vllm_choreo.train.packing import Packing, pack_as_text

PLACEMENTS = ("writer", "reader", "both")


def adapted_calls(packing: Packing, placement: str) -> tuple[bool, ...]:
    """For each call, whether the adapter encodes it.

    "writer": those that encode messages, while calls that generate are the plain model's;
    "reader": those that generate, from messages that the plain model encoded; "both": all.

    Raises:
        ChoreoError: no such placement.
    """
    if placement not in PLACEMENTS:
        raise ChoreoError(
            f"placement must be one of {PLACEMENTS}", parameter="placement", value=placement
        )
    return tuple(
        placement == "both" or call.is_decode == (placement == "reader") for call in packing.calls
    )


def text_logprobs(model: PackedModel, packing: Packing) -> torch.Tensor:
    """What the frozen model without adapter says of every trained token, reading text.

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
    """What the choreographed calls say of every trained token: float32 `[num_trained, vocab]`."""
    return model.logits(packing, packing.trained_rows, adapted).float().log_softmax(-1)


def cross_entropy(logprobs: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Nats per recorded token."""
    return F.nll_loss(logprobs, packing.trained_ids)


def divergence(logprobs: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """KL(text || choreographed), nats per token, over the whole vocabulary."""
    return F.kl_div(logprobs, text, reduction="batchmean", log_target=True)

# SPDX-License-Identifier: Apache-2.0
"""Settings of a training: every number that it depends on, but for the data and the model."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_choreo.chat.cutter import DEFAULT_CUT_TOKENS
from vllm_choreo.chat.matching import AUTO_CUTS
from vllm_choreo.errors import ChoreoError
from vllm_choreo.trained_adapter import current_placement, uses_adapter

LOSSES = ("kl", "ce")
CUTS = AUTO_CUTS
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_CHOICES = {
    "loss": LOSSES,
    "schedule": SCHEDULES,
    "cut": CUTS,
    "dtype": ("float32", "bfloat16"),
    "device": ("cpu", "cuda"),
}


@dataclass(frozen=True)
class TrainSettings:
    """Choices that a training depends on, beside the data and the model.

    Attributes:
        placement: calls that use the adapter, see `uses_adapter`.
        cut: "messages": calls read messages as they were recorded; "content": pieces of the same
            texts, each behind the beginning alone, see `pieces_of`.
        cut_tokens: tokens of a piece on average.
        loss: "kl": nats from the text's distribution; "ce": surprise at the recorded tokens.
        rank, alpha, dropout: numbers of LoRA; the defaults are those of Bai and Eisner,
            "Accelerating Language Model Workflows with Prompt Choreography".
        targets: linear layers that LoRA changes, by the ends of their names.
        learning_rate: largest learning rate.
        schedule, warmup: fall of the learning rate, as `transformers.get_scheduler` names it, and
            the share of all steps in which it grows.
        epochs: passes over all runs, at most.
        batch: runs per step of the optimiser.
        pack_tokens: most tokens of the forwards into which a batch is cut, if its runs allow.
        clip: greatest norm of a step's gradient.
        patience: evaluations without a smaller development loss that end the training.
        evaluations: evaluations per epoch.
        seed: random seed of the adapter's first weights, the order of the runs and dropout.
        dtype: type of the base model's weights; the adapter is trained in float32.
        device: "cpu" or "cuda".
        save_memory: run each layer once more in the backward pass instead of keeping activations.

    Raises:
        ChoreoError: a setting has a value that is not allowed.
    """

    placement: str
    cut: str = "messages"
    cut_tokens: int = DEFAULT_CUT_TOKENS
    loss: str = "kl"
    rank: int = 64
    alpha: float = 32.0
    dropout: float = 0.05
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    learning_rate: float = 5e-5
    schedule: str = "linear"
    warmup: float = 0.0
    epochs: int = 8
    batch: int = 4
    pack_tokens: int = 2048
    clip: float = 1.0
    patience: int = 3
    evaluations: int = 1
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    save_memory: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", current_placement(self.placement))
        uses_adapter(self.placement, generates=True)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise self._error(name, f"must be one of {choices}")
        for name in ("rank", "epochs", "batch", "pack_tokens", "patience", "evaluations"):
            if getattr(self, name) < 1:
                raise self._error(name, "must be at least 1")
        if self.cut_tokens < 2:
            raise self._error("cut_tokens", "must be at least 2")
        for name in ("alpha", "learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise self._error(name, "must be above 0")
        for name in ("dropout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise self._error(name, "must be from 0 to below 1")
        if not self.targets:
            raise self._error("targets", "must name one or more layers")

    def _error(self, name: str, reason: str) -> ChoreoError:
        return ChoreoError(f"{name} {reason}", parameter=name, value=getattr(self, name))

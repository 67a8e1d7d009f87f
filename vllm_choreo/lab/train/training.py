# SPDX-License-Identifier: Apache-2.0
"""`Training`: an adapter, its optimiser, and steps; all of its state can be saved and set again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.train.checkpoint import random_states, set_random_states
from vllm_choreo.lab.train.examples import Example, concat_examples, packed_together
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loss import (
    adapted_calls,
    cross_entropy,
    likeliest_divergence,
    trained_logprobs,
)
from vllm_choreo.lab.train.settings import TrainSettings


class Training:
    """An adapter in training: its weights, its optimiser and its schedule.

    Args:
        model: model of `adapted_model`.
        settings: settings of the training.
        num_steps: steps that the schedule is made for.
    """

    def __init__(self, model: PackedModel, settings: TrainSettings, num_steps: int) -> None:
        import transformers

        self.model = model
        self.settings = settings
        self.weights = {
            name: weight for name, weight in model.model.named_parameters() if weight.requires_grad
        }
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=settings.learning_rate)
        self._schedule = transformers.get_scheduler(
            settings.schedule, self._optimizer, round(settings.warmup * num_steps), num_steps
        )

    def step(self, batch: Sequence[Example]) -> float:
        """Make one step of the optimiser on a batch; return its loss in nats per token."""
        self.model.model.train()
        total = self._accumulate(batch, is_training=True)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.settings.clip)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def evaluate(self, examples: Sequence[Example]) -> float:
        """The loss on examples, in nats per token, without dropout."""
        self.model.model.eval()
        with torch.no_grad():
            return self._accumulate(examples, is_training=False)

    def _accumulate(self, examples: Sequence[Example], is_training: bool) -> float:
        """Mean loss over all trained tokens, forward after forward."""
        num_trained = sum(call.num_generated for e in examples for call in e.calls)
        total = 0.0
        for group in packed_together(examples, self.settings.pack_tokens):
            packing, teacher = concat_examples(group)
            packing = packing.to(self.model.device)
            adapted = adapted_calls(packing, self.settings.placement)
            logprobs = trained_logprobs(self.model, packing, adapted)
            if self.settings.loss == "kl":
                assert teacher is not None, "every example was taught before"
                loss = likeliest_divergence(logprobs, teacher.to(self.model.device))
            else:
                loss = cross_entropy(logprobs, packing)
            loss = loss * (len(logprobs) / num_trained)
            if is_training:
                loss.backward()
            total += float(loss.detach())
        return total

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter's weights, by name."""
        return {name: weight.detach().cpu().clone() for name, weight in self.weights.items()}

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Set the adapter's weights."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(snapshot[name])

    def state(self) -> dict[str, Any]:
        """State that later steps depend on: weights, optimiser, schedule and random generators."""
        return {
            "weights": self.snapshot(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "random": random_states(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned."""
        self.restore(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        set_random_states(state["random"])


def adapted_model(path: str, settings: TrainSettings) -> PackedModel:
    """A model with a new adapter, which changes nothing yet; seeds the random generators.

    Raises:
        ChoreoError: the model cannot be loaded or choreographed, or has no such layers.
    """
    import peft
    import transformers

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ChoreoError(
            "torch finds no GPU: leave device out", parameter="device", value=settings.device
        )
    torch.manual_seed(settings.seed)
    try:
        base = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, settings.dtype)
        )
    except (OSError, ValueError) as error:
        raise ChoreoError(
            f"transformers does not load it: {error}", parameter="model", value=path
        ) from error
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        task_type="CAUSAL_LM",
    )
    try:
        model = PackedModel(peft.get_peft_model(base.to(settings.device), config))
    except ValueError as error:
        if isinstance(error, ChoreoError):
            raise
        raise ChoreoError(str(error), parameter="targets", value=settings.targets) from error
    if settings.save_memory:
        model.checkpoint_gradients()
    return model

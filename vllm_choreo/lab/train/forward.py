# SPDX-License-Identifier: Apache-2.0
"""`PackedModel`: a `transformers` model that runs whole choreographies in one forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_choreo.errors import ChoreoError, TooLongError, UnsupportedModelError
from vllm_choreo.lab.train import packed_attention
from vllm_choreo.lab.train.angles import make_precise
from vllm_choreo.lab.train.gate import gate_adapter
from vllm_choreo.lab.train.packing import Packing
from vllm_choreo.lab.train.proof import prove_rotations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedModel:
    """A causal language model, taken over for packed transcripts.

    Args:
        model: a model of `transformers`, or a `PeftModel` with one LoRA adapter. It is switched to
            our attention and runs nothing else from then on.

    Attributes:
        model: the same object, for its parameters, device and modes.
        rotations: rotation of every attention layer, proven by running the model.
        has_adapter: whether the model is a `PeftModel`.

    Raises:
        UnsupportedModelError: its positions or its attention cannot be choreographed; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        packed_attention.register()
        self.model = model
        has_adapter = hasattr(model, "peft_config")
        base = model.get_base_model() if has_adapter else model
        _switch(base)
        make_precise(base)
        if has_adapter:
            gate_adapter(model)
        self.has_adapter = has_adapter
        self.rotations = prove_rotations(base)
        config = base.config.get_text_config()
        self._context = getattr(config, "max_position_embeddings", None)
        self._vocab_size = config.vocab_size
        self._takes_rows = "logits_to_keep" in inspect.signature(type(base).forward).parameters

    def logits(
        self,
        packing: Packing,
        rows: torch.Tensor | None = None,
        adapted: Sequence[bool] | None = None,
    ) -> torch.Tensor:
        """Run one forward of all calls; differentiable.

        Args:
            packing: calls of one transcript or several, on the model's device.
            rows: int64 `[num_rows]`, the packed rows whose logits are wanted; None: all.
            adapted: for each call, whether the adapter encodes it; None: all calls.

        Returns:
            `[num_rows, vocab_size]`; row `i` predicts the token after packed token `rows[i]`.

        Raises:
            ChoreoError: tokens that the model does not have; flags without an adapter.
            TooLongError: a position beyond the model's context.
        """
        self.check(packing)
        self._check_adapter(adapted)
        flags = None if adapted is None else packing.per_token(adapted)
        keep = rows is not None and self._takes_rows
        with packed_attention.carrying(
            packed_attention.PackedAttention(packing, self.rotations, flags)
        ):
            logits = self.model(
                input_ids=packing.token_ids[None],
                position_ids=packing.positions[None],
                use_cache=False,
                **({"logits_to_keep": rows} if keep else {}),
            ).logits[0]
        return logits if rows is None or keep else logits[rows]

    def checkpoint_gradients(self) -> None:
        """Keep no activations inside layers: they run once more in the backward pass."""
        self.model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": packed_attention.checkpoint_contexts}
        )

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        device: torch.device = self.model.device
        return device

    def check(self, packing: Packing) -> None:
        """Check that the model has every token and position of a packing.

        Raises:
            ChoreoError: tokens that the model does not have.
            TooLongError: a position beyond the model's context.
        """
        largest = int(packing.token_ids.max())
        if largest >= self._vocab_size:
            raise ChoreoError(
                f"the model has {self._vocab_size} tokens; the transcript is of another model",
                parameter="token_ids",
                value=largest,
            )
        end = max(call.end for call in packing.calls)
        if self._context is not None and end > self._context:
            raise TooLongError(
                f"a call reaches position {end - 1}, but the model knows positions below "
                f"{self._context}; leave such transcripts out",
                parameter="calls",
                value=end,
            )

    def _check_adapter(self, adapted: Sequence[bool] | None) -> None:
        if adapted is not None and not self.has_adapter:
            raise ChoreoError(
                "the model has no adapter: wrap it by peft.get_peft_model before",
                parameter="adapted",
                value=adapted,
            )


def _switch(model: PreTrainedModel) -> None:
    """Set our attention; the proof shows later whether every layer calls it."""
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not call the attention interface of transformers, so "
            "its attention cannot be choreographed (ALiBi models such as BLOOM are of this kind); "
            "train another model",
            parameter="model",
            value=type(model).__name__,
        )
    model.set_attn_implementation(packed_attention.NAME)

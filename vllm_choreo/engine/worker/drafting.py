# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers, which read messages by spans as the model itself does.

vLLM runs a drafter over every step's tokens, and stores what its layers make of them in the blocks
in which the model's lie. So a message is encoded in the drafter, too, when the model encodes it,
and calls find it there by the spans by which the model reads it:

    first pass      the step's tokens, each one token further or not, by the drafter's kind
    further passes  one token of every request, the draft of the pass before

vLLM finds slots by positions, which are those of a text. Of calls it is given virtual indices, by
which they lie where they should; the drafter's model sees the positions. How a pass becomes a batch
is told in `v1_drafting.py` and `v2_drafting.py`, of vLLM's two model runners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class Drafter(Protocol):
    """Drafter of either model runner."""

    model: torch.nn.Module
    draft_model_config: ModelConfig
    supports_mm_inputs: bool

    @property
    def hidden_size_read(self) -> int:
        """Width of the model's hidden states that the drafter reads; 0: it reads none."""

    def choreograph(self, spans: DrafterSpans) -> None:
        """Have the drafter read calls by their spans from now on."""


class DrafterSpans:
    """Spans of the batches that a drafter runs.

    Args:
        first, following: batchers of the first pass of a step and of the others, of the drafter's
            kinds of layers. These read what the first one has `running`.
    """

    def __init__(self, first: SpanBatcher, following: SpanBatcher) -> None:
        self._batchers = (first, following)

    def update(
        self,
        started: Mapping[str, RequestSpans],
        finished: Iterable[str],
        block_ids: Mapping[str, Sequence[Sequence[int]]],
    ) -> None:
        """Take in what the scheduler sent with a step, see `SpanBatcher.update`."""
        finished = [*finished]
        for batcher in self._batchers:
            batcher.update(started, finished, block_ids)

    def reads_spans(self, request_ids: Iterable[str]) -> bool:
        """Return whether a request reads more than its own tokens, or has them elsewhere."""
        return self._batchers[0].reads_spans(request_ids)

    def lay_out(self, batch: StepBatch, is_first: bool) -> torch.Tensor | None:
        """Hand the spans of a pass to the drafter's layers.

        Args:
            batch: the pass, as the batch of a step.
            is_first: whether it is the first of the step.

        Returns:
            int64 `[num_tokens]`, by token of the pass: what is added to its virtual index to get
            its position; None: nothing.
        """
        first, following = self._batchers
        first.running = (first if is_first else following).batch(batch)
        return first.shifts(batch)

    def end(self) -> None:
        """Forget the pass; what else the drafter runs are dummies."""
        self._batchers[0].running = None


def take_over(drafter: object, classes: Mapping[type, type]) -> None:
    """Make a drafter of vLLM's one of ours, in place.

    Args:
        classes: ours, by vLLM's.

    Raises:
        UnsupportedOptionError: there is none of its kind.
    """
    ours = classes.get(type(drafter))
    if ours is None:
        raise UnsupportedOptionError(
            "beside calls no drafter of this kind was run: choose another method, or run vLLM "
            'without the plugin (VLLM_PLUGINS="")',
            parameter="speculative_config.method",
            value=type(drafter).__name__,
        )
    # vLLM's runner names the class; the subclass only adds to it.
    drafter.__class__ = ours


class DraftLayers(torch.nn.Module):
    """The model of a drafter, as the position probe runs a model: by tokens and positions."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self._drafter = drafter
        self.model = drafter.model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> object:
        """Run tokens, each behind hidden states of all ones if the drafter reads any."""
        drafter, read = self._drafter, {}
        if drafter.hidden_size_read:
            shape = len(input_ids), drafter.hidden_size_read
            dtype = drafter.draft_model_config.dtype
            read["hidden_states"] = torch.ones(shape, dtype=dtype, device=input_ids.device)
        embeds = self.model.embed_input_ids(input_ids) if drafter.supports_mm_inputs else None
        return self.model(
            input_ids=None if drafter.supports_mm_inputs else input_ids,
            positions=positions,
            inputs_embeds=embeds,
            **read,
        )

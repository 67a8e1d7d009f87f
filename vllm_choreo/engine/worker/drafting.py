# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers, which read messages by spans as the model itself does.

vLLM runs a drafter over every step's tokens, and stores what its layers make of them in the blocks
in which the model's lie. So a message is encoded in the drafter, too, when the model encodes it,
and calls find it there by the spans by which the model reads it:

    first pass      the step's tokens, each one token further or not, by the drafter's kind
    further passes  one token of every request, the draft of the pass before

vLLM finds slots by positions, which are those of a text. Of calls it is given virtual indices, by
which they lie where they should; the drafter's model sees the positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class DrafterSpans:
    """Spans of the batches that a drafter runs.

    Args:
        first, following: batchers of the first pass of a step and of the others, of the drafter's
            kinds of layers. These read what the first one has `running`.

    Attributes:
        request_ids: ids of the requests of the step, in the order of the batch.
        shifts: int64 `[num_tokens]`: by token of the pass, what is added to its virtual index to
            get its position; None: nothing.
    """

    def __init__(self, first: SpanBatcher, following: SpanBatcher) -> None:
        self._batchers = (first, following)
        self.request_ids: Sequence[str] = ()
        self.shifts: torch.Tensor | None = None

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

    def lay_out(self, batch: CommonAttentionMetadata, num_added: int, is_first: bool) -> None:
        """Hand the spans of a pass to the drafter's layers.

        Args:
            batch: vLLM's metadata of the pass.
            num_added: tokens by which the first pass is longer, of each request, than the step.
            is_first: whether it is the first of the step.
        """
        first, following = self._batchers
        step = self._step(batch, num_added)
        self.shifts = first.shifts(step)
        first.running = (first if is_first else following).batch(step)

    def end(self) -> None:
        """Forget the pass; what else the drafter runs are dummies."""
        self._batchers[0].running = self.shifts = None

    def _step(self, batch: CommonAttentionMetadata, num_added: int) -> StepBatch:
        host_lens = batch.seq_lens
        if host_lens.device.type != "cpu":
            # vLLM adds them on the device alone; for kernels there a bound will do.
            assert batch.seq_lens_cpu_upper_bound is not None
            host_lens = batch.seq_lens_cpu_upper_bound + num_added
        return StepBatch(
            self.request_ids,
            batch.query_start_loc_cpu,
            host_lens,
            batch.block_table_tensor,
            batch.seq_lens,
        )


class ChoreoDrafter(SpecDecodeBaseProposer):
    """Mixin of our drafters, over vLLM's."""

    spans: DrafterSpans
    _seen_positions: torch.Tensor

    def choreograph(self, spans: DrafterSpans) -> None:
        """Have the drafter read calls by their spans from now on."""
        self.spans = spans
        self._seen_positions = torch.zeros_like(
            self.mrope_positions if self.uses_mrope else self.positions
        )

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Extend vLLM's method: the pass ends with it."""
        try:
            return super().propose(*args, **kwargs)
        finally:
            self.spans.end()

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Extend vLLM's method, which comes before every pass."""
        num_added = self.net_num_new_slots_per_request
        self.spans.lay_out(common_attn_metadata, num_added, is_first=draft_index == 0)
        return super().build_per_group_and_layer_attn_metadata(common_attn_metadata, draft_index)

    def _get_positions(self, num_tokens: int) -> torch.Tensor:
        """Extend vLLM's method: where the model of the drafter sees the tokens of a pass.

        In memory of its own, as CUDA graphs need it. What lies beyond the drafter's context is seen
        at its end: drafts there are worth nothing, and harm nobody.
        """
        seen = self._seen_positions[..., :num_tokens]
        seen.copy_(super()._get_positions(num_tokens))
        if self.spans.shifts is not None:
            seen[..., : len(self.spans.shifts)] += self.spans.shifts
        return seen.clamp_(max=self.draft_model_config.max_model_len - 1)


class ChoreoEagleProposer(ChoreoDrafter, EagleProposer):
    """vLLM's drafter of EAGLE heads and MTP layers, which read calls by spans."""


class ChoreoDraftModelProposer(ChoreoDrafter, DraftModelProposer):
    """vLLM's drafter of draft models, which read calls by spans."""


_DRAFTERS: Mapping[type, type[ChoreoDrafter]] = {
    EagleProposer: ChoreoEagleProposer,
    DraftModelProposer: ChoreoDraftModelProposer,
}


def choreographed(drafter: object) -> ChoreoDrafter:
    """Make a drafter of vLLM's one of ours, in place.

    Raises:
        UnsupportedOptionError: there is none of its kind.
    """
    ours = _DRAFTERS.get(type(drafter))
    if ours is None:
        raise UnsupportedOptionError(
            "beside calls no drafter of this kind was run: choose another method, or run vLLM "
            'without the plugin (VLLM_PLUGINS="")',
            parameter="speculative_config.method",
            value=type(drafter).__name__,
        )
    # vLLM's runner names the class; the subclass only adds to it.
    drafter.__class__ = ours
    assert isinstance(drafter, ChoreoDrafter)
    return drafter


class DraftLayers(torch.nn.Module):
    """The model of a drafter, as the position probe runs a model: by tokens and positions."""

    def __init__(self, drafter: ChoreoDrafter) -> None:
        super().__init__()
        self._drafter = drafter
        self.model = drafter.model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> object:
        """Run tokens, each behind hidden states of all ones if the drafter reads any."""
        drafter = self._drafter
        read = {}
        if drafter.pass_hidden_states_to_model:
            read["hidden_states"] = torch.ones_like(drafter.hidden_states[: len(input_ids)])
        embeds = self.model.embed_input_ids(input_ids) if drafter.supports_mm_inputs else None
        return self.model(
            input_ids=None if drafter.supports_mm_inputs else input_ids,
            positions=positions,
            inputs_embeds=embeds,
            **read,
        )

# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of vLLM's model runner V1, which read calls by spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_choreo.engine.worker.drafting import DrafterSpans
from vllm_choreo.engine.worker.span_batcher import StepBatch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class ChoreoDrafter(SpecDecodeBaseProposer):
    """Mixin of our drafters, over vLLM's.

    Attributes:
        spans: spans of the passes that it runs.
        request_ids: ids of the requests of the step, in the order of the batch.
    """

    spans: DrafterSpans
    request_ids: Sequence[str] = ()
    _seen_positions: torch.Tensor
    _pass_shifts: torch.Tensor | None = None  # of the pass's tokens, see `DrafterSpans.lay_out`

    @property
    def hidden_size_read(self) -> int:
        return self.hidden_states.shape[1] if self.pass_hidden_states_to_model else 0

    def choreograph(self, spans: DrafterSpans) -> None:
        """Have the drafter read calls by their spans from now on."""
        self.spans = spans
        self._seen_positions = torch.zeros_like(
            self.mrope_positions if self.uses_mrope else self.positions
        )

    def propose(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Extend vLLM's method: the pass ends with it."""
        try:
            return super().propose(*args, **kwargs)
        finally:
            self.spans.end()
            self._pass_shifts = None

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Extend vLLM's method, which comes before every pass."""
        batch = self._batch(common_attn_metadata)
        self._pass_shifts = self.spans.lay_out(batch, is_first=draft_index == 0)
        return super().build_per_group_and_layer_attn_metadata(common_attn_metadata, draft_index)

    def _batch(self, metadata: CommonAttentionMetadata) -> StepBatch:
        """Return the batch of a pass by vLLM's metadata of it."""
        host_lens = metadata.seq_lens
        if host_lens.device.type != "cpu":
            # vLLM adds them on the device alone; for kernels there a bound will do.
            assert metadata.seq_lens_cpu_upper_bound is not None
            num_added = self.net_num_new_slots_per_request  # of each request, to the step's tokens
            host_lens = metadata.seq_lens_cpu_upper_bound + num_added
        return StepBatch(
            self.request_ids,
            metadata.query_start_loc_cpu,
            host_lens,
            metadata.block_table_tensor,
            metadata.seq_lens,
        )

    def _get_positions(self, num_tokens: int) -> torch.Tensor:
        """Extend vLLM's method: where the model of the drafter sees the tokens of a pass.

        In memory of its own, as CUDA graphs need it. What lies beyond the drafter's context is seen
        at its end: drafts there are worth nothing, and harm nobody.
        """
        seen = self._seen_positions[..., :num_tokens]
        seen.copy_(super()._get_positions(num_tokens))
        if self._pass_shifts is not None:
            seen[..., : len(self._pass_shifts)] += self._pass_shifts
        return seen.clamp_(max=self.draft_model_config.max_model_len - 1)


class ChoreoEagleProposer(ChoreoDrafter, EagleProposer):
    """vLLM's drafter of EAGLE heads and MTP layers, which read calls by spans."""


class ChoreoDraftModelProposer(ChoreoDrafter, DraftModelProposer):
    """vLLM's drafter of draft models, which read calls by spans."""


DRAFTERS: Mapping[type, type[ChoreoDrafter]] = {
    EagleProposer: ChoreoEagleProposer,
    DraftModelProposer: ChoreoDraftModelProposer,
}

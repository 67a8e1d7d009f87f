# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of vLLM's model runner V2, which read calls by spans.

vLLM keeps the positions of a pass in a buffer, finds slots by them, and has the model run at them:
for that run they are moved to where calls see their tokens. A full CUDA graph would run the
passes with neither these positions nor the spans: it is not chosen for steps with calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

from vllm_choreo.engine.worker.drafting import DrafterSpans
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.engine.worker.v2_graphs import GuardedGraphManager


class ChoreoSpeculatorGraphManager(GuardedGraphManager, SpeculatorCudaGraphManager):
    """Graph manager of a drafter that chooses no CUDA graph of a mode above `max_mode`."""


class ChoreoSpeculator(DraftModelSpeculator):
    """Mixin of our drafters, over vLLM's.

    Attributes:
        spans: spans of the passes that it runs.
        step: batch of the step that is drafted behind; None: a dummy run.
    """

    spans: DrafterSpans
    step: StepBatch | None = None
    _num_passes = 0  # that have begun behind the step

    @property
    def hidden_size_read(self) -> int:
        raise NotImplementedError

    @property
    def graph_managers(self) -> list[ChoreoSpeculatorGraphManager]:
        """Choosers of CUDA graphs for passes."""
        raise NotImplementedError

    def choreograph(self, spans: DrafterSpans) -> None:
        """Have the drafter read calls by their spans from now on."""
        self.spans = spans
        for manager in self.graph_managers:
            manager.__class__ = ChoreoSpeculatorGraphManager

    def propose(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Extend vLLM's method: passes behind a step with calls choose no full CUDA graph."""
        self._num_passes = 0
        has_calls = self.step is not None and self.spans.reads_spans(self.step.request_ids)
        for manager in self.graph_managers:
            manager.max_mode = CUDAGraphMode.PIECEWISE if has_calls else CUDAGraphMode.FULL
        try:
            return super().propose(*args, **kwargs)
        finally:
            self.spans.end()

    @contextmanager
    def reading(self, positions: torch.Tensor) -> Iterator[None]:
        """Within, a pass runs: its layers read spans, and tokens stand where calls see them.

        What lies beyond the drafter's context is seen at its end: drafts there are worth nothing,
        and harm nobody.

        Args:
            positions: int64 `[num_tokens]`, virtual indices, at which the model runs.
        """
        shifts = None
        if self.step is not None:
            shifts = self.spans.lay_out(self._batch(self.step), is_first=self._num_passes == 0)
            self._num_passes += 1
        if shifts is None:
            yield
            return
        indices = positions.clone()
        positions[: len(shifts)] += shifts
        positions.clamp_(max=self.draft_model_config.max_model_len - 1)
        try:
            yield
        finally:
            positions.copy_(indices)

    def _batch(self, step: StepBatch) -> StepBatch:
        """Return the batch of the pass that begins behind a step."""
        counted = torch.arange(len(step.request_ids) + 1, dtype=torch.int32)
        num_extra = self.num_extra_query_per_req  # in the first pass, of each request
        starts = counted if self._num_passes else step.query_start_loc + num_extra * counted
        lens = host_lens = self.input_buffers.seq_lens[: len(step.request_ids)]
        if lens.device.type != "cpu":
            # What was right of the step is known on the device alone; there a bound will do.
            host_lens = step.seq_lens + num_extra + self._num_passes
        return step._replace(query_start_loc=starts, seq_lens=host_lens, device_seq_lens=lens)


class _ChoreoTargetDependentSpeculator(ChoreoSpeculator, TargetDependentARSpeculator):
    """Mixin of drafters that read hidden states of the model, token by token of the step."""

    @property
    def hidden_size_read(self) -> int:
        return self.hidden_size

    @property
    def graph_managers(self) -> list[ChoreoSpeculatorGraphManager]:
        managers = (self.prefill_cudagraph_manager, self.decode_cudagraph_manager)
        return [manager for manager in managers if manager is not None]

    def _run_model(self, num_tokens: int, *args: object, **kwargs: object) -> object:
        """Extend vLLM's method, by which every pass runs."""
        with self.reading(self.input_buffers.positions[:num_tokens]):
            return super()._run_model(num_tokens, *args, **kwargs)


class ChoreoEagleSpeculator(_ChoreoTargetDependentSpeculator, EagleSpeculator):
    """vLLM's drafter of EAGLE heads, which read calls by spans."""


class ChoreoMTPSpeculator(_ChoreoTargetDependentSpeculator, MTPSpeculator):
    """vLLM's drafter of MTP layers, which read calls by spans."""


class ChoreoStandaloneSpeculator(ChoreoSpeculator, StandaloneARSpeculator):
    """vLLM's drafter of draft models, which read calls by spans."""

    hidden_size_read = 0
    graph_managers: list[ChoreoSpeculatorGraphManager] = []  # noqa: RUF012

    def _run_model(
        self, input_ids: torch.Tensor, positions: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """Extend vLLM's method, by which every pass runs."""
        with self.reading(positions):
            return super()._run_model(input_ids, positions, *args, **kwargs)


DRAFTERS: Mapping[type, type[ChoreoSpeculator]] = {
    EagleSpeculator: ChoreoEagleSpeculator,
    MTPSpeculator: ChoreoMTPSpeculator,
    StandaloneARSpeculator: ChoreoStandaloneSpeculator,
}

# SPDX-License-Identifier: Apache-2.0
"""Repair by layers in a worker: hidden states are captured, and layers run before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_choreo.engine.step import ChoreoStep
from vllm_choreo.engine.worker.hidden_memory import HiddenMemory
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.stage_proof import prove_stages
from vllm_choreo.engine.worker.stage_writer import StageWriter
from vllm_choreo.engine.worker.stages import LayerStages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.attention import Attention


class PartialRuns:
    """A worker's part in repair by layers, step by step.

    Args:
        model: the model as vLLM runs it, without wrappers.
        layers: the attention layers, by their names.
        groups: KV cache group of each layer, by its name.
        before_run: called before the model is run outside of steps, see `StageWriter`.

    Raises:
        UnsupportedModelError: the model cannot be run by layers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        batcher: SpanBatcher,
        layers: Mapping[str, Attention],
        groups: Mapping[str, int],
        before_run: Callable[[int, LoRARequest | None], None],
    ) -> None:
        self.memory = HiddenMemory(batcher.block_size)
        self.batch: StepBatch | None = None
        num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._stages = LayerStages(model, num_layers)
        prove_stages(self._stages, vllm_config, [*layers], batcher.device, before_run)
        self._writer = StageWriter(
            self._stages, self.memory, batcher, layers, groups, vllm_config, before_run
        )

    def begin(self, output: SchedulerOutput, step: ChoreoStep) -> dict[str, list[list[float]]]:
        """Run what comes before a step; returns the attention as `StageWriter.write` does."""
        self.memory.update(step.captures, output.finished_req_ids)
        attention = self._writer.write(step.stages)
        # Runs may begin with what is given up in the same planning.
        self.memory.forget(step.forgotten)
        return attention

    def has_captures(self, request_ids: Iterable[str]) -> bool:
        """Return whether a request has hidden states captured, which no CUDA graph does."""
        return bool(self.memory.layers_of(request_ids))

    @contextmanager
    def capturing(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Capture, within the context, hidden states of the requests that want it.

        `batch` is set by whoever lays out the batch.
        """
        layers = self.memory.layers_of(request_ids)
        if not layers:
            yield
            return
        try:
            with self._stages.capturing(layers, self._capture):
                yield
        finally:
            self.batch = None

    def _capture(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        assert self.batch is not None, "a batch is laid out before it runs"
        with gpu_sync_allowed():  # they go to host memory now
            self.memory.capture(layer, hidden, positions, self.batch)

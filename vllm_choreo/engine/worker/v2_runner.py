# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners V2, on GPU and CPU, which hand the spans of a batch to the layers.

They run vLLM's own Triton kernels: on CPU this needs vLLM with Triton for CPUs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.errors import UnsupportedModelError


class ChoreoCudaGraphManager(ModelCudaGraphManager):
    """Graph manager that chooses no full CUDA graph while those are not allowed."""

    allow_full = True

    def dispatch(self: Any, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        if self.allow_full:
            return super().dispatch(*args, **kwargs)
        candidates, self._candidates = self._candidates, self._without_full
        try:
            return super().dispatch(*args, **kwargs)
        finally:
            self._candidates = candidates

    @cached_property
    def _without_full(self: Any) -> dict[Any, list[BatchExecutionDescriptor]]:
        return {
            key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
            for key, descs in self._candidates.items()
        }


class ChoreoModelRunnerV2(ChoreoModelRunner):
    """Mixin that takes part where vLLM looks up the blocks of a batch; dummy runs look none up."""

    def prepare_choreography(self: Any) -> None:
        """Refuse models with M-RoPE, whose positions are built elsewhere; prepare others.

        Raises:
            UnsupportedModelError: the model cannot be choreographed; says why.
        """
        model = self.vllm_config.model_config
        if model.uses_mrope:
            raise UnsupportedModelError(
                "models with M-RoPE are choreographed by vLLM's model runner V1 alone: set "
                "VLLM_USE_V2_MODEL_RUNNER=0, or run this model without the plugin "
                '(VLLM_PLUGINS="")',
                parameter="model",
                value=model.model,
            )
        super().prepare_choreography()

    @property
    def graphs(self: Any) -> ChoreoCudaGraphManager:
        return self.cudagraph_manager

    @property
    def _table_width(self: Any) -> int:
        width: int = self.block_tables.input_block_tables[0].shape[1]
        return width

    def _guard_graphs(self: Any) -> None:
        self.cudagraph_manager.__class__ = ChoreoCudaGraphManager

    def prepare_attn(self: Any, input_batch: Any) -> Any:
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        if self._in_step:
            num_reqs = input_batch.num_reqs
            step = StepBatch(
                input_batch.req_ids,
                torch.from_numpy(input_batch.query_start_loc_np[: num_reqs + 1]),
                input_batch.seq_lens_cpu_upper_bound[:num_reqs],
                block_tables[0][:num_reqs],
                input_batch.seq_lens[:num_reqs],
            )
            self._lay_out(step, input_batch.positions)
        return block_tables, slot_mappings


class ChoreoGPUModelRunnerV2(ChoreoModelRunnerV2, GPUModelRunner):
    """The runner V2 on GPU."""


class ChoreoCPUModelRunnerV2(ChoreoModelRunnerV2, CPUModelRunner):
    """The runner V2 on CPU."""

# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners V2, on GPU and CPU, which hand the spans of a batch to the layers.

They run vLLM's own Triton kernels: on CPU this needs vLLM with Triton for CPUs.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class ChoreoCudaGraphManager(ModelCudaGraphManager):
    """Graph manager that chooses no full CUDA graph while those are not allowed."""

    allow_full = True
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        if self.allow_full:
            return super().dispatch(*args, **kwargs)
        candidates, self._candidates = self._candidates, self._without_full
        try:
            return super().dispatch(*args, **kwargs)
        finally:
            self._candidates = candidates

    @cached_property
    def _without_full(self) -> dict[tuple[int, int], list[BatchExecutionDescriptor]]:
        return {
            key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
            for key, descs in self._candidates.items()
        }


class ChoreoGPUModelRunnerV2(ChoreoModelRunner, GPUModelRunner):
    """The runner V2 on GPU, which takes part where vLLM looks up the blocks of a batch.

    Dummy runs look none up.
    """

    def prepare_choreography(self) -> None:
        """Refuse models with M-RoPE or states, whose inputs are built elsewhere; prepare others.

        Raises:
            UnsupportedModelError: the model cannot be choreographed; says why.
        """
        model = self.vllm_config.model_config
        if model.uses_mrope or self.states is not None:
            raise UnsupportedModelError(
                "models with M-RoPE or states are choreographed by vLLM's model runner V1: set "
                "VLLM_USE_V2_MODEL_RUNNER=0, or run this model without the plugin "
                '(VLLM_PLUGINS="")',
                parameter="model",
                value=model.model,
            )
        super().prepare_choreography()

    @property
    def graphs(self) -> ChoreoCudaGraphManager:
        return self.cudagraph_manager

    @property
    def _table_width(self) -> int:
        width: int = self.block_tables.input_block_tables[0].shape[1]
        return width

    def _guard_graphs(self) -> None:
        self.cudagraph_manager.__class__ = ChoreoCudaGraphManager

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
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


class ChoreoCPUModelRunnerV2(ChoreoGPUModelRunnerV2, CPUModelRunner):
    """The runner V2 on CPU."""

# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners V2, on GPU and CPU, which hand the spans of a batch to the layers.

They run vLLM's own Triton kernels: on CPU this needs vLLM with Triton for CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.worker.drafting import take_over
from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.engine.worker.state_layers import StateBatch
from vllm_choreo.engine.worker.v2_adapters import ChoreoPromptLogprobsWorker, requests_of_logits
from vllm_choreo.engine.worker.v2_drafting import DRAFTERS, ChoreoSpeculator
from vllm_choreo.engine.worker.v2_graphs import ChoreoCudaGraphManager, PlannedGraphManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.states import RequestState


class ChoreoModelState(ModelState):
    """Mixin over the runner's state of a model: positions of own tokens, layers with states.

    Of models with M-RoPE vLLM makes the positions here, in rows; and it builds the metadata of the
    layers in its KV cache, among which those with states are not.
    """

    runner: ChoreoGPUModelRunnerV2

    @classmethod
    def take_over(cls, state: ModelState, runner: ChoreoGPUModelRunnerV2) -> None:
        """Mix this class into the state of a runner's model."""
        name = f"Choreo{type(state).__name__}"
        state.__class__ = type(name, (cls, type(state)), {"runner": runner})

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        inputs: dict[str, torch.Tensor | None] = super().prepare_inputs(input_batch, req_states)
        if (rows := inputs.get("positions")) is not None:
            self.runner.place_rows(rows)
        return inputs

    def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, object]:
        by_layer: dict[str, object] = super().prepare_attn(input_batch, *args, **kwargs)
        return by_layer | self.runner.state_metadata(input_batch)


class ChoreoGPUModelRunnerV2(ChoreoModelRunner, GPUModelRunner):
    """The runner V2 on GPU, which takes part where vLLM looks up the blocks of a batch.

    Dummy runs look none up.
    """

    # The batch of the step that runs, until it is sampled, and the positions of its tokens.
    _step: StepBatch | None = None
    _positions: torch.Tensor

    def prepare_choreography(self) -> None:
        super().prepare_choreography()
        ChoreoModelState.take_over(self.model_state, self)
        if self.lora_config and self.prompt_logprobs_worker is not None:
            ChoreoPromptLogprobsWorker.take_over(self.prompt_logprobs_worker, self._use_adapters_of)

    @property
    def choreo_drafter(self) -> ChoreoSpeculator:
        take_over(self.speculator, DRAFTERS)
        speculator: ChoreoSpeculator = self.speculator
        return speculator

    @property
    def graphs(self) -> ChoreoCudaGraphManager:
        return self.cudagraph_manager

    @property
    def _table_width(self) -> int:
        width: int = self.block_tables.input_block_tables[0].shape[1]
        return width

    def _guard_graphs(self) -> None:
        manager = self.cudagraph_manager
        manager.__class__ = ChoreoCudaGraphManager
        if not ChoreoConfig.from_vllm(self.vllm_config).full_cuda_graphs:
            return
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        manager.planned = PlannedGraphManager(
            *(self._running_plans, self.vllm_config, self.device, mode, self.decode_query_len)
        )
        self.batcher.make_room(manager.planned.num_requests)

    @contextmanager
    def _running_plans(self, num_requests: int) -> Iterator[None]:
        """While this is entered, layers run what a full graph of so many requests reads."""
        tables = self.block_tables.input_block_tables
        by_group = {group: table[:num_requests] for group, table in enumerate(tables)}
        self.batcher.running = self.batcher.room_plans(num_requests, by_group)
        try:
            yield
        finally:
            self.batcher.running = None

    def profile_cudagraph_memory(self) -> int:
        """Extend vLLM's method: a second set of graphs is counted as the first one is."""
        num_bytes: int = super().profile_cudagraph_memory()
        is_twofold = ChoreoConfig.from_vllm(self.vllm_config).full_cuda_graphs
        return 2 * num_bytes if is_twofold else num_bytes

    def _allow_graphs(self, mode: CUDAGraphMode, scheduled: Mapping[str, int]) -> None:
        super()._allow_graphs(mode, scheduled)
        self.graphs.allows_planned = (
            mode == CUDAGraphMode.PIECEWISE
            and self.graphs.planned is not None
            and all(num_tokens == 1 for num_tokens in scheduled.values())
            and self.batcher.fits_room(scheduled)
        )

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        self._step = None
        if self._in_step:
            num_reqs = input_batch.num_reqs
            lens = host_lens = input_batch.seq_lens[:num_reqs]
            if lens.device.type != "cpu":
                # Of asynchronous steps with drafts it is known on the device alone what was right.
                host_lens = input_batch.seq_lens_cpu_upper_bound[:num_reqs]
            self._step = StepBatch(
                input_batch.req_ids,
                torch.from_numpy(input_batch.query_start_loc_np[: num_reqs + 1]),
                host_lens,
                block_tables[0][:num_reqs],
                lens,
                {group: table[:num_reqs] for group, table in enumerate(block_tables)},
                input_batch.num_reqs_after_padding if self.graphs.is_planned else None,
            )
            self._positions = input_batch.positions
            self._lay_out(self._step, self._positions)
        return block_tables, slot_mappings

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object:
        """Extend vLLM's method, in which samplers and drafters find tokens by virtual indices."""
        step, self._step = self._step, None
        if step is not None:
            self.batcher.place(step, self._positions, back=True)
        if self.drafter_spans is None:
            return super().sample_tokens(grammar_output)
        self.speculator.step = step
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self.speculator.step = None

    def place_rows(self, positions: torch.Tensor) -> None:
        """Place own tokens of a step, whose positions are rows (M-RoPE).

        Args:
            positions: int64 `[num_rows, num_tokens]`, on the device, changed in place.
        """
        if self._in_step and self._step is not None:
            self.batcher.place(self._step, positions)

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Extend vLLM's method: with LoRA, drafts are checked by their requests' adapters."""
        if self.lora_config and input_batch.num_draft_tokens:
            self._use_adapters_of(input_batch, requests_of_logits(input_batch))
        sampled: tuple[SamplerOutput, torch.Tensor, torch.Tensor] = super().sample(
            hidden_states, input_batch, grammar_output
        )
        return sampled

    def _use_adapters_of(self, batch: InputBatch, requests: np.ndarray) -> None:
        """Have the next rows take the adapters of requests, by their numbers in the batch."""
        by_request, _, adapters = self.lora_state.make_lora_inputs(
            batch.req_ids, batch.idx_mapping_np, batch.num_scheduled_tokens
        )
        by_row = tuple(by_request[request] for request in requests)
        self._set_active_loras(by_row, by_row, adapters)

    def state_metadata(self, input_batch: InputBatch) -> dict[str, object]:
        """Attention metadata of the layers with states, by layer; of a dummy run, too."""
        if self.states is None:
            return {}
        num_padded = len(input_batch.seq_lens)
        is_prefilling = torch.zeros(num_padded, dtype=torch.bool)
        is_prefilling[: input_batch.num_reqs] = torch.from_numpy(input_batch.is_prefilling_np)
        return self.states.metadata(
            StateBatch(
                input_batch.req_ids if self._in_step else [],
                input_batch.query_start_loc,
                torch.from_numpy(input_batch.query_start_loc_np),
                input_batch.seq_lens,
                input_batch.seq_lens_cpu_upper_bound[:num_padded],
                is_prefilling,
            )
        )


class ChoreoCPUModelRunnerV2(ChoreoGPUModelRunnerV2, CPUModelRunner):
    """The runner V2 on CPU."""

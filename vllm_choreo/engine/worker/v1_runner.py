# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners V1, on CPU and GPU, which hand the spans of a batch to the layers."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_choreo.engine.worker.drafting import take_over
from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.span_batcher import StepBatch
from vllm_choreo.engine.worker.state_layers import StateBatch
from vllm_choreo.engine.worker.v1_drafting import DRAFTERS, ChoreoDrafter

if TYPE_CHECKING:
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.block_table import BlockTable


_GRAPHS = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class ChoreoDispatcher(CudagraphDispatcher):
    """Dispatcher that chooses no CUDA graph of a mode above `max_mode`."""

    max_mode = CUDAGraphMode.FULL

    def dispatch(
        self, *args: Any, invalid_modes: Set[CUDAGraphMode] | None = None, **kwargs: Any
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        if self.max_mode != CUDAGraphMode.FULL:
            above = {m for m in _GRAPHS if m.value > self.max_mode.value}
            invalid_modes = above | (invalid_modes or set())
        return super().dispatch(*args, invalid_modes=invalid_modes, **kwargs)


class ChoreoGPUModelRunner(ChoreoModelRunner, GPUModelRunner):
    """The runner V1 on GPU, which takes part where vLLM builds the metadata of a batch."""

    _shifts: torch.Tensor | None = None  # of a step's tokens, see `SpanBatcher.shifts`

    @property
    def graphs(self) -> ChoreoDispatcher:
        return self.cudagraph_dispatcher

    @property
    def choreo_drafter(self) -> ChoreoDrafter:
        take_over(self.drafter, DRAFTERS)
        drafter: ChoreoDrafter = self.drafter
        return drafter

    @property
    def _table_width(self) -> int:
        width: int = self.input_batch.block_table[0].max_num_blocks_per_req
        return width

    @property
    def _block_tables(self) -> list[BlockTable]:
        """Block tables of the batch, by KV cache group."""
        tables: list[BlockTable] = self.input_batch.block_table.block_tables
        return tables

    def _guard_graphs(self) -> None:
        self.cudagraph_dispatcher.__class__ = ChoreoDispatcher

    def _build_attention_metadata(
        self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, object], object]:
        if self._in_step:
            tables = [table.get_device_tensor(num_reqs) for table in self._block_tables]
            step = StepBatch(
                self.input_batch.req_ids[:num_reqs],
                self.query_start_loc.cpu[: num_reqs + 1],
                self.optimistic_seq_lens_cpu[:num_reqs],
                tables[0],
                self.seq_lens[:num_reqs],
                dict(enumerate(tables)),
            )
            rows = self.mrope_positions.gpu if self.uses_mrope else self.positions
            self._lay_out(step, rows)
            if self.drafter_spans is not None:
                self.drafter.request_ids = [*step.request_ids]
                self._shifts = self.batcher.shifts(step)
        by_layer, for_drafter = super()._build_attention_metadata(
            num_tokens, num_reqs, *args, **kwargs
        )
        if self.states is not None:
            num_padded = kwargs.get("num_reqs_padded") or num_reqs
            by_layer |= self.states.metadata(self._state_batch(num_reqs, num_padded))
        return by_layer, for_drafter

    def _get_positions(self, num_tokens: int | torch.Tensor) -> torch.Tensor:
        """Extend vLLM's method, by which a drafter gets positions: of calls, virtual indices."""
        positions: torch.Tensor = super()._get_positions(num_tokens)
        if self._shifts is None:
            return positions
        chosen = slice(num_tokens) if isinstance(num_tokens, int) else num_tokens
        return positions - self._shifts[chosen]

    def _state_batch(self, num_reqs: int, num_padded: int) -> StateBatch:
        """Batch of a step, or of a dummy run, for layers with states."""
        inputs = self.input_batch
        is_prefilling = (
            inputs.num_computed_tokens_cpu_tensor[:num_padded]
            < inputs.num_prompt_tokens_cpu_tensor[:num_padded]
        )
        is_prefilling[num_reqs:] = False  # rows of requests that have gone
        return StateBatch(
            inputs.req_ids[:num_reqs] if self._in_step else [],
            self.query_start_loc.gpu[: num_padded + 1],
            self.query_start_loc.cpu[: num_padded + 1],
            self.seq_lens[:num_padded],
            self.optimistic_seq_lens_cpu[:num_padded],
            is_prefilling,
        )

    def calculate_reorder_batch_threshold(self) -> None:
        """Extend vLLM's method: layers with states take requests that decode first in a batch."""
        super().calculate_reorder_batch_threshold()
        if self.states is not None:
            self.reorder_batch_threshold = 1


class ChoreoCPUModelRunner(ChoreoGPUModelRunner, CPUModelRunner):
    """The runner V1 on CPU."""

    num_prompt_logprobs: dict[str, int]  # vLLM's, of requests whose prompt is not done

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Extend vLLM's method: with LoRA, one request at a time, by its own adapter.

        Its rows are not those that the step samples from, for which adapters were set: where their
        numbers differ, vLLM's kernels on CPU would end the engine.
        """
        if not self.lora_config:
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        wanted, found = self.num_prompt_logprobs, {}
        for request_id in [r for r in wanted if r in num_scheduled_tokens]:
            request = self.requests[request_id]
            num_left = len(request.prompt_token_ids or ()) - 1 - request.num_computed_tokens
            num_rows = min(num_scheduled_tokens[request_id], num_left)
            if num_rows > 0:
                self._use_adapter(num_rows, request.lora_request)
            self.num_prompt_logprobs = {request_id: wanted.pop(request_id)}
            found.update(super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens))
            wanted |= self.num_prompt_logprobs  # if more of the prompt is to come
        self.num_prompt_logprobs = wanted
        return found

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object:
        """Extend vLLM's method: hide generators of requests whose prompt goes on in the next step.

        Tokens sampled for those are dropped. vLLM then turns their generators back, by an offset
        that generators on CPU lack: the engine would end. A generator that is not used in the step
        needs no turning back.
        """
        generators = self.input_batch.generators
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        unused = {row: generators.pop(row) for row in dropped if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(unused)

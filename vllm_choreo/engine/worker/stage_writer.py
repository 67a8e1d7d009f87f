# SPDX-License-Identifier: Apache-2.0
"""Runs of layers before a step: tokens of stored messages, in another context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import set_forward_context
from vllm.transformers_utils.config import mrope_num_dims

from vllm_choreo.engine.step import StageRun, Watch
from vllm_choreo.engine.worker.hidden_memory import HiddenMemory
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.stages import LayerStages
from vllm_choreo.engine.worker.tensors import to_device
from vllm_choreo.engine.worker.watching import AttentionWatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.attention import Attention


class _Piece(NamedTuple):
    """Tokens `begin … end-1` of a run."""

    run: StageRun
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


class StageWriter:
    """Runner of stage runs, with as many tokens at once as a step of the engine may have.

    Keys and values of a batch are stored, layer by layer, before any query reads: a run may read
    what those before it in the same batch write.

    Args:
        layers: the attention layers, by their names.
        groups: KV cache group of each layer, by its name.
        before_run: called before the model is run, with the number of tokens and vLLM's request of
            the adapter that is to run them, or None.
    """

    def __init__(
        self,
        stages: LayerStages,
        memory: HiddenMemory,
        batcher: SpanBatcher,
        layers: Mapping[str, Attention],
        groups: Mapping[str, int],
        vllm_config: VllmConfig,
        before_run: Callable[[int, LoRARequest | None], None],
    ) -> None:
        self._groups = groups
        self._stages = stages
        self._memory = memory
        self._batcher = batcher
        self._layers = layers
        self._vllm_config = vllm_config
        self._before_run = before_run
        self._num_rows = mrope_num_dims(vllm_config.model_config.hf_config)

    @torch.inference_mode()
    def write(self, runs: Sequence[StageRun]) -> dict[str, list[list[float]]]:
        """Run all stage runs, in their order.

        Returns:
            By call id, of the calls that look, one list per parent: the attention of each token.
        """
        seen = {}
        for watch, group in groupby(runs, key=lambda run: run.watch):
            if watch is None:
                self._write_all([*group])
            else:
                seen[watch.call] = self._watched(watch, [*group])
        return seen

    def _watched(self, watch: Watch, runs: Sequence[StageRun]) -> list[list[float]]:
        names, spans = [*self._layers], runs[0].spans
        chosen = [names[index] for index in watch.layers]
        parents = [spans.of_group(self._groups[name]).parent for name in chosen]
        layers = [self._layers[name].impl.attention for name in chosen]
        found = AttentionWatch(zip(layers, parents, strict=True), watch.num_tokens)
        self._batcher.watch = found
        try:
            self._write_all(runs)
        finally:
            self._batcher.watch = None
        # Every worker has its heads, and the scheduler gets the output of one.
        return [tensor_model_parallel_all_reduce(span).tolist() for span in found.received]

    def _write_all(self, runs: Sequence[StageRun]) -> None:
        for batch in batches(runs, self._vllm_config.scheduler_config.max_num_batched_tokens):
            self._write(batch)

    def _write(self, batch: Sequence[_Piece]) -> None:
        runs = {f"stage {number}": piece.run for number, piece in enumerate(batch)}
        names, batcher, device = [*runs], self._batcher, self._batcher.device
        batcher.update(
            {name: run.spans for name, run in runs.items()},
            finished=(),
            block_ids={name: run.blocks for name, run in runs.items()},
        )
        try:
            step, indices = _laid_out(batch, names, device)
            slots = [to_device(of_group, device) for of_group in _slots(batch, batcher.block_size)]
            positions = to_device(indices, device)
            batcher.place(step, positions)
            if self._num_rows:
                positions = positions.expand(self._num_rows, -1).clone()  # as in text
            batcher.running = batcher.batch(step, always=True)
            reader = next(iter(self._layers.values())).impl
            metadata = reader.step_metadata(step.query_start_loc)
            with set_forward_context(
                metadata and dict.fromkeys(self._layers, metadata),
                self._vllm_config,
                num_tokens=len(indices),
                slot_mapping={name: slots[self._groups[name]] for name in self._layers},
                skip_compiled=True,
            ):
                self._before_run(len(indices), batch[0].run.lora)
                token_ids = to_device(_token_ids(batch), device)
                for layers in batch[0].run.layers:
                    hidden = self._hidden(batch, layers[0])
                    self._stages.run(layers, token_ids, positions, hidden)
        finally:
            batcher.running = None
            batcher.update({}, names)

    def _hidden(self, batch: Sequence[_Piece], layer: int) -> torch.Tensor | None:
        """Hidden states with which a layer begins; None: layer 0 begins with the tokens."""
        if not layer:
            return None
        found = []
        for run, begin, end in batch:
            assert run.key is not None, "a run that begins in the middle has a key"
            found.append(self._memory.rows(run.key, layer, run.start + begin, run.start + end))
        return to_device(torch.cat(found), self._batcher.device)


def batches(runs: Sequence[StageRun], max_tokens: int) -> Iterator[list[_Piece]]:
    """Cut runs into batches, in order, of the same layers and adapter and `max_tokens` at most.

    Ranges of layers do not overlap, and each begins with what was captured: so all pieces of a
    batch go through the first range before any goes through the next.
    """
    batch: list[_Piece] = []
    num_left = max_tokens
    for run in runs:
        done = 0
        while done < len(run.token_ids):
            if batch and (not num_left or not _go_together(batch[0].run, run)):
                yield batch
                batch, num_left = [], max_tokens
            end = min(len(run.token_ids), done + num_left)
            batch.append(_Piece(run, done, end))
            num_left -= end - done
            done = end
    if batch:
        yield batch


def _go_together(one: StageRun, other: StageRun) -> bool:
    # One adapter at once: vLLM has room for few, and the calls of a step seldom have several.
    return one.layers == other.layers and one.lora == other.lora


def _laid_out(
    batch: Sequence[_Piece], names: Sequence[str], device: torch.device
) -> tuple[StepBatch, torch.Tensor]:
    """Batch as a step has it, and the virtual index of every token, int64 `[num_tokens]`."""
    counts = torch.tensor([0, *(piece.num_tokens for piece in batch)], dtype=torch.int32)
    seq_lens = torch.tensor([run.first + end for run, _, end in batch], dtype=torch.int32)
    tables = [
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(of_group, dtype=torch.int32) for of_group in of_pieces], batch_first=True
        )
        for of_pieces in zip(*(piece.run.blocks for piece in batch), strict=True)
    ]
    on_device = [to_device(table, device) for table in tables]
    indices = [torch.arange(run.first + begin, run.first + end) for run, begin, end in batch]
    step = StepBatch(
        names,
        counts.cumsum(0, dtype=torch.int32),
        seq_lens,
        on_device[0],
        to_device(seq_lens, device),
        dict(enumerate(on_device)),
    )
    return step, torch.cat(indices)


def _slots(batch: Sequence[_Piece], block_size: int) -> list[torch.Tensor]:
    """Slots at which the tokens' keys and values are stored, int64 `[num_tokens]`, by group."""
    found: list[list[torch.Tensor]] = [[] for _ in batch[0].run.blocks]
    for run, begin, end in batch:
        indices = torch.arange(run.first + begin, run.first + end)
        for slots, of_group in zip(found, run.blocks, strict=True):
            blocks = torch.tensor(of_group)[indices // block_size]
            slots.append(blocks * block_size + indices % block_size)
    return [torch.cat(slots) for slots in found]


def _token_ids(batch: Sequence[_Piece]) -> torch.Tensor:
    # Of the dtype that vLLM's runners give.
    tokens = [token for run, begin, end in batch for token in run.token_ids[begin:end]]
    return torch.tensor(tokens, dtype=torch.int32)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner, which hands the spans of the batch to the attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.batch import BatchPlanner
from vllm_choreo.engine.cpu_backend import ChoreoCPUImpl
from vllm_choreo.engine.host_blocks import HostBlocks, num_host_blocks
from vllm_choreo.engine.probe import LayerPositions, probe_positions
from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.ops import Rotation, default_impl, detect_layout, reposition_keys
from vllm_choreo.plan import BlockMove, ChoreoStep

_NO_ROTATION = Rotation(inv_freq=torch.empty(0, dtype=torch.float64), is_neox=True)


class ChoreoCPUModelRunner(CPUModelRunner):
    """The V1 runner on CPU. `prepare_choreography` comes before the first choreographed step."""

    planner: BatchPlanner
    layers: dict[str, Any]
    layer_positions: Sequence[LayerPositions]
    host_blocks: HostBlocks | None
    _in_step = False

    def prepare_choreography(self) -> None:
        """Probe the loaded model, and check what the KV cache looks like.

        Raises:
            UnsupportedModelError: the model cannot be choreographed; says why.
            UnsupportedLayoutError: the KV cache cannot be read; says what was found.
        """
        self.layers = layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for name, layer in layers.items():
            _check_layer(name, layer)
            self._check_layout(layer)
        self.layer_positions = probe_positions(
            self.get_model(), self.vllm_config, list(layers), self.device
        )
        for found in self.layer_positions:
            layers[found.layer].impl.rotation = found.rotation
        rotations = {p.rotation: None for p in self.layer_positions if p.rotation is not None}
        config = ChoreoConfig.from_vllm(self.vllm_config)
        self.planner = BatchPlanner(
            self.cache_config.block_size, list(rotations), config.shared_reading
        )
        self.host_blocks = self._make_host_blocks(config.host_memory_gib)
        default_impl()  # says now, not in the first request, if it is the slow one

    def _make_host_blocks(self, host_memory_gib: float) -> HostBlocks | None:
        if not host_memory_gib:
            return None
        caches = [layer.kv_cache for layer in self.layers.values()]
        block_bytes = sum(cache[0].numel() * cache.element_size() for cache in caches)
        return HostBlocks(caches, num_host_blocks(host_memory_gib, block_bytes))

    def _check_layout(self, layer: Any) -> None:
        def write(
            keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            layer.impl.do_kv_cache_update(layer, keys, values, kv_cache, slots)

        detect_layout(
            write,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            block_size=self.cache_config.block_size,
            dtype=self.kv_cache_dtype,
        )

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        step: ChoreoStep = scheduler_output.choreo
        self.planner.update(step.started, list(scheduler_output.finished_req_ids))
        if self.host_blocks is not None:
            self.host_blocks.copy(step.saves, step.loads)
        self._move_keys(step.moves)
        self._in_step = True
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            self._in_step = False

    def _move_keys(self, moves: Sequence[BlockMove]) -> None:
        """Rotate keys of whole blocks in every layer, in place first, then into copies."""
        for is_copy in (False, True):
            chosen = [move for move in moves if (move.src != move.dst) == is_copy]
            if not chosen:
                continue
            src = torch.tensor([move.src for move in chosen], dtype=torch.int32)
            dst = torch.tensor([move.dst for move in chosen], dtype=torch.int32)
            deltas = torch.tensor([move.delta for move in chosen])
            for layer in self.layers.values():
                rotation = layer.impl.rotation or _NO_ROTATION
                reposition_keys(
                    layer.kv_cache, src, dst, rotation.cos_sin(deltas), rotation.is_neox
                )

    def _build_attention_metadata(
        self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = super()._build_attention_metadata(num_tokens, num_reqs, *args, **kwargs)
        if self._in_step:
            per_layer = metadata[0]
            vllm_metadata = next(iter(per_layer.values()))
            batch = self.planner.batch(
                self.input_batch.req_ids[:num_reqs],
                vllm_metadata.query_start_loc[: num_reqs + 1],
                vllm_metadata.seq_lens[:num_reqs],
                vllm_metadata.block_table[:num_reqs],
            )
            for layer_metadata in per_layer.values():
                layer_metadata.choreo = batch
        return metadata


def _check_layer(name: str, layer: Any) -> None:
    """
    Raises:
        UnsupportedModelError: attention of a kind for which spans mean nothing.
    """
    impl = layer.impl
    if not isinstance(impl, ChoreoCPUImpl):
        found = f"the backend {type(impl).__name__}"
    elif impl.sliding_window > 0:
        found = f"a sliding window of {impl.sliding_window} tokens"
    elif impl.sinks is not None:
        found = "attention sinks"
    elif impl.kv_sharing_target_layer_name is not None:
        found = "keys and values shared with another layer"
    else:
        return
    raise UnsupportedModelError(
        f"layer {name} has {found}, which cannot be choreographed; run this model without the "
        'plugin (VLLM_PLUGINS="")',
        parameter="model",
        value=name,
    )

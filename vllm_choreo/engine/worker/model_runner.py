# SPDX-License-Identifier: Apache-2.0
"""Mixin of our model runners, over vLLM's, on every device and in both generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.kv_cache import block_bytes, groups_of_layers
from vllm_choreo.engine.speculation import has_layers
from vllm_choreo.engine.step import step_of, with_attention
from vllm_choreo.engine.worker.attention_output import AsyncAttentionOutput
from vllm_choreo.engine.worker.composition_probe import probe_composition
from vllm_choreo.engine.worker.cpu_adapters import correct_adapters
from vllm_choreo.engine.worker.cpu_rotary import correct_rotary, rotates_by_heads
from vllm_choreo.engine.worker.drafting import Drafter, DrafterSpans, DraftLayers
from vllm_choreo.engine.worker.flash import flash_attention_of
from vllm_choreo.engine.worker.host_blocks import HostBlocks
from vllm_choreo.engine.worker.layer_checks import (
    attention_layers,
    check_layer,
    check_own_keys,
    check_seen,
    check_shared_memory,
    check_sharing,
    check_sizes,
    source_of,
)
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.partial_runs import PartialRuns
from vllm_choreo.engine.worker.probe import LayerPositions, probe_positions
from vllm_choreo.engine.worker.quantized import quantized_kv
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.state_layers import StateLayers
from vllm_choreo.engine.worker.tensors import to_device
from vllm_choreo.engine.worker.warmup import warm_up
from vllm_choreo.engine.worker.windows import widen_windows
from vllm_choreo.memory_changes import BlockMove
from vllm_choreo.ops import Rotation, detect_layout, reposition_keys
from vllm_choreo.ops.sharing import PARTIAL_BYTES

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_NO_ROTATION = Rotation(inv_freq=torch.empty(0, dtype=torch.float64), is_neox=True)


class GraphChooser(Protocol):
    """Chooser of CUDA graphs for a step."""

    max_mode: CUDAGraphMode


class ChoreoModelRunner:
    """Model runner of choreographed steps, mixed in before one of vLLM's runners.

    Before a step come the moves and copies of blocks; in it, the spans go to the attention layers
    by `batcher.running`. `prepare_choreography` comes before the first choreographed step.
    """

    # Of vLLM's runners.
    vllm_config: VllmConfig
    cache_config: CacheConfig
    kv_cache_config: KVCacheConfig
    lora_config: LoRAConfig | None
    lora_manager: WorkerLoRAManager
    device: torch.device
    get_model: Callable[[], torch.nn.Module]
    add_lora: Callable[[LoRARequest], bool]
    _set_active_loras: Callable[[tuple[int, ...], tuple[int, ...], set[LoRARequest]], None]

    batcher: SpanBatcher
    layers: dict[str, Attention]
    sharing_layers: Mapping[str, Attention] = {}  # they read keys that earlier ones store
    drafter_layers: Mapping[str, Attention] = {}
    drafter_spans: DrafterSpans | None = None
    groups: Mapping[str, int]  # KV cache group of each layer
    layer_positions: Sequence[LayerPositions]
    host_blocks: HostBlocks | None
    partial_runs: PartialRuns | None = None
    states: StateLayers | None = None
    _in_step = False
    _attention: Mapping[str, Sequence[Sequence[float]]] = {}  # for the next output
    _workspace: torch.Tensor | None = None

    @property
    def graphs(self) -> GraphChooser:
        """Chooser of CUDA graphs for a step."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Extend vLLM's method: layers with sliding windows have room for all tokens, too.

        Unless these are KV cache groups of their own. Those with states are left out: their memory
        is `states`.
        """
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
        config = ChoreoConfig.from_vllm(self.vllm_config)
        if states:
            is_composed = config.composed_states
            self.states = StateLayers(states, self.vllm_config, self.device, is_composed)
        others = {name: spec for name, spec in specs.items() if name not in states}
        check_sizes(others, attention_layers(self.vllm_config))
        return others if config.window_groups else widen_windows(others, self.vllm_config)

    def memory_for_keys(self, available: int) -> int:
        """Bytes that are left for keys and values beside the states that come with them.

        Args:
            available: bytes for both.
        """
        if self.states is None:
            return available
        specs = self.get_kv_cache_spec().values()
        of_a_token = sum(spec.page_size_bytes / spec.block_size for spec in specs)
        per_state = ChoreoConfig.from_vllm(self.vllm_config).tokens_per_state
        of_states = self.states.state_bytes / per_state
        return int((available - self.states.state_bytes) * of_a_token / (of_a_token + of_states))

    def prepare_choreography(self) -> None:
        """Probe the loaded model, check what the KV cache looks like, and make room for states.

        Raises:
            UnsupportedModelError: the model cannot be choreographed; says why.
            UnsupportedLayoutError: the KV cache cannot be read; says what was found.
        """
        modules = set(self.get_model().modules())
        found = attention_layers(self.vllm_config)
        check_seen(self.kv_cache_config, self.vllm_config, found)
        layers = {n: layer for n, layer in found.items() if layer in modules}
        self.sharing_layers = {n: layer for n, layer in layers.items() if source_of(layer)}
        self.layers = {n: layer for n, layer in layers.items() if n not in self.sharing_layers}
        self._check_layers(layers)
        check_shared_memory({n: layer.impl.kv_cache_of(layer) for n, layer in layers.items()})
        if self.lora_config:
            correct_adapters(self.lora_manager)
        if self.device.type == "cpu" and rotates_by_heads(self.vllm_config.model_config):
            correct_rotary(self.get_model())
        config = ChoreoConfig.from_vllm(self.vllm_config)
        check_sharing(self.sharing_layers, config, self.cache_config)
        if self.states is not None:
            num_tokens = self.kv_cache_config.num_blocks * self.cache_config.block_size
            self.states.allocate(config.num_states(num_tokens))
        self.layer_positions = probe_positions(
            *(self.get_model(), self.vllm_config, list(layers), self.device),
            *(self._use_adapter, self.states),
        )
        if config.composed_states and self.states is not None:
            self.states.errors = probe_composition(
                *(self.get_model(), self.vllm_config, list(layers), self.device),
                *(self._use_adapter, self.states),
            )
        self.groups = groups_of_layers(self.kv_cache_config)
        is_tiled = any(layer.impl.resolved_kernels() == "triton" for layer in layers.values())
        kinds = self._kinds(layers, self.layer_positions)
        self.batcher = self._make_batcher(kinds, is_tiled)
        if config.flash_prefills:
            self.batcher.flash_attention = flash_attention_of(layers)
        self._read_spans(layers, kinds, self.batcher)
        if has_layers(self.vllm_config.speculative_config):
            drafters = {n: layer for n, layer in found.items() if n not in layers}
            self._prepare_drafter(drafters, is_tiled)
        self.host_blocks = self._make_host_blocks(config)
        if config.hidden_bytes:
            self.partial_runs = PartialRuns(
                *(self.get_model(), self.vllm_config, self.batcher),
                *(self.layers, self.groups, self._use_adapter),
            )
        self._guard_graphs()
        if is_tiled:
            warm_up(layers.values(), self.batcher, self._table_width)
            if config.reposition == "in_place":
                self._move_keys([BlockMove(src=0, dst=0, delta=0)])  # block 0 is nobody's

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Extend vLLM's method, which measures the memory that is left for the KV cache.

        On a GPU that would leave out the partial results of attention: allocated here, once.
        """
        if self.device.type != "cpu" and self._workspace is None:
            self._workspace = torch.empty(
                PARTIAL_BYTES // 4, dtype=torch.float32, device=self.device
            )
        super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def _use_adapter(self, num_tokens: int, lora: LoRARequest | None = None) -> None:
        """Have the next run of the model use one adapter, or none, for all `num_tokens` tokens."""
        if self.lora_config:
            by_token = (lora.lora_int_id if lora else 0,) * num_tokens
            self._set_active_loras(by_token, by_token, {lora} if lora else set())

    def _prepare_drafter(self, layers: Mapping[str, Attention], is_tiled: bool) -> None:
        """Have a drafter's layers read messages, too, in which they are found at the same slots.

        Raises:
            UnsupportedModelError: the drafter cannot be choreographed; says why.
            UnsupportedOptionError: no drafter of its kind can.
        """
        drafter = self.choreo_drafter
        check_own_keys(layers)
        self.drafter_layers = layers
        self._check_layers(layers)
        found = probe_positions(
            *(DraftLayers(drafter), self.vllm_config, list(layers), self.device),
            model_config=drafter.draft_model_config,
        )
        kinds = self._kinds(layers, found)
        first, following = (self._make_batcher(kinds, is_tiled) for _ in range(2))
        self._read_spans(layers, kinds, first)
        self.drafter_spans = DrafterSpans(first, following)
        drafter.choreograph(self.drafter_spans)

    def _kinds(
        self, layers: Mapping[str, Attention], found: Sequence[LayerPositions]
    ) -> dict[str, LayerKind]:
        """Kinds of layers by name: rotation, shape and group, which layers of one plan share."""
        kinds = {}
        dtype = self.vllm_config.model_config.dtype  # of queries, whatever the cache holds
        for positions in found:
            name, layer = positions.layer, layers[positions.layer]
            heads = layer.num_heads, layer.num_kv_heads, layer.head_size
            shape = LayerShape(*heads, dtype, layer.sliding_window)
            spec = layer.get_kv_cache_spec(self.vllm_config)
            token_bytes = spec.real_page_size_bytes // spec.block_size
            kinds[name] = LayerKind(positions.rotation, shape, token_bytes, self.groups[name])
        return kinds

    def _make_batcher(self, kinds: Mapping[str, LayerKind], is_tiled: bool) -> SpanBatcher:
        return SpanBatcher(
            self.cache_config.block_size,
            list(dict.fromkeys(kinds.values())),
            ChoreoConfig.from_vllm(self.vllm_config).shared_reading,
            self.device,
            is_tiled,
            self._workspace,
        )

    def _read_spans(
        self, layers: Mapping[str, Attention], kinds: Mapping[str, LayerKind], batcher: SpanBatcher
    ) -> None:
        """Have layers read, from now on, what a batcher plans."""
        for name, kind in kinds.items():
            layers[name].impl.prepare(batcher, kind, quantized_kv(layers[name]))

    def _make_host_blocks(self, config: ChoreoConfig) -> HostBlocks | None:
        num_bytes = block_bytes(self.kv_cache_config, self.sharing_layers)
        num_blocks = config.num_host_blocks(num_bytes)
        if self.states is not None:
            num_tokens = num_blocks * self.cache_config.block_size
            self.states.allocate_in_host(num_tokens // config.tokens_per_state)
        caches = [layer.impl.kv_cache_of(layer) for layer in self._stored_layers.values()]
        return HostBlocks(caches, num_blocks) if num_blocks else None

    @property
    def kv_caches_by_layer(self) -> list[torch.Tensor]:
        """KV caches, in the order of `layers`, `[num_blocks, num_kv_heads, block_size, ...]`."""
        return [layer.impl.kv_cache_of(layer) for layer in self.layers.values()]

    @property
    def host_copies_by_layer(self) -> list[torch.Tensor]:
        """Copies in host memory, in the order of `layers`; of the host tier, which there is."""
        assert self.host_blocks is not None
        return self.host_blocks.copies[: len(self.layers)]

    @property
    def _stored_layers(self) -> dict[str, Attention]:
        """Layers of which blocks hold keys and values: of the model, then of a drafter."""
        return {**self.layers, **self.drafter_layers}

    def _check_layers(self, layers: Mapping[str, Attention]) -> None:
        for name, layer in layers.items():
            check_layer(name, layer, self.cache_config.block_size)
            layer.impl.layer_name = name
            if not source_of(layer):
                self._check_layout(layer)

    def _check_layout(self, layer: Attention) -> None:
        def write(
            keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            layer.impl.store(layer, keys, values, kv_cache, slots)

        detect_layout(
            write,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            block_size=self.cache_config.block_size,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
            readable=(layer.impl.layout,),
            quantized=quantized_kv(layer),
            value_size=layer.impl.value_size,
        )

    @property
    def _table_width(self) -> int:
        """Columns of the block tables of batches."""
        raise NotImplementedError

    @property
    def choreo_drafter(self) -> Drafter:
        """Drafter of vLLM's runner, which is made one of ours.

        Raises:
            UnsupportedOptionError: there is none of its kind.
        """
        raise NotImplementedError

    def _guard_graphs(self) -> None:
        """Make `graphs` obey `max_mode`."""
        raise NotImplementedError

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> object:
        step = step_of(scheduler_output)
        if step is None:  # a dummy run or a warm-up
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        for lora in step.reloads:
            self.add_lora(lora)
        if step.written_blocks() and has_kv_transfer_group():
            # vLLM's own method does so, too, but only then: what ended may still be copied out.
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        block_ids = _started_blocks(scheduler_output)
        finished = scheduler_output.finished_req_ids
        self.batcher.update(step.started, finished, block_ids)
        if self.drafter_spans is not None:
            self.drafter_spans.update(step.started, finished, block_ids)
        if self.states is not None:
            self.states.update(step.states, finished, step.started)
            self.states.copy_in_host(step.state_saves, step.state_loads)
            self.states.start(step.state_starts)
        if self.host_blocks is not None:
            self.host_blocks.copy(step.saves, step.loads)
        self._move_keys(step.moves)
        scheduled, partial_runs = scheduler_output.num_scheduled_tokens, self.partial_runs
        if partial_runs is not None:
            self._attention = partial_runs.begin(scheduler_output, step)
        capturing: AbstractContextManager[None] | None = None
        if partial_runs is not None and partial_runs.has_captures(scheduled):
            capturing = partial_runs.capturing(scheduled)
        if capturing:  # hidden states are taken in Python, between layers
            mode = CUDAGraphMode.NONE
        elif self.batcher.reads_spans(scheduled):
            # A full graph of vLLM's replays its own attention; piecewise ones leave attention out.
            mode = CUDAGraphMode.PIECEWISE
        else:
            mode = CUDAGraphMode.FULL
        self._allow_graphs(mode, scheduled)
        self._in_step = True
        try:
            with capturing or nullcontext():
                output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
                return self._with_attention(output)
        finally:
            self._in_step = False
            self._allow_graphs(CUDAGraphMode.FULL, {})
            self.batcher.running = None

    def _allow_graphs(self, mode: CUDAGraphMode, scheduled: Mapping[str, int]) -> None:
        """Have `graphs` choose for a step.

        Args:
            mode: the largest mode of vLLM's own graphs.
            scheduled: numbers of tokens by request.
        """
        self.graphs.max_mode = mode

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object:
        """Extend vLLM's method: the output has what calls attended to, for the scheduler."""
        return self._with_attention(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def _with_attention(self, output: object) -> object:
        """Add the attention that parents' tokens got, of calls that looked, to a step's output."""
        attention = self._attention
        if not attention or not isinstance(output, (ModelRunnerOutput, AsyncModelRunnerOutput)):
            return output
        self._attention = {}
        if isinstance(output, ModelRunnerOutput):
            return with_attention(output, attention)
        return AsyncAttentionOutput(output, attention)

    def _lay_out(self, step: StepBatch, positions: torch.Tensor) -> None:
        """Hand the spans of a step to the layers, and the positions of own tokens to the model."""
        self.batcher.place(step, positions)
        self.batcher.running = self.batcher.batch(step, always=self._has_context(step))
        if self.partial_runs is not None:
            self.partial_runs.batch = step

    def _has_context(self, step: StepBatch) -> bool:
        """Return whether prompts go on behind what is computed, which vLLM's attention cannot."""
        if all(layer.impl.reads_context for layer in self.layers.values()):
            return False
        lengths = step.query_start_loc.diff()
        return bool(((lengths > 1) & (step.seq_lens > lengths)).any())

    def _move_keys(self, moves: Sequence[BlockMove]) -> None:
        """Rotate keys of whole blocks in the layers of their group, in place, then into copies."""
        for is_copy, group in product((False, True), sorted({move.group for move in moves})):
            chosen = [
                move for move in moves if (move.src != move.dst, move.group) == (is_copy, group)
            ]
            if not chosen:
                continue
            stored = self._stored_layers.items()
            layers = [layer for name, layer in stored if self.groups[name] == group]
            src, dst = (
                to_device(torch.tensor(blocks, dtype=torch.int32), self.device)
                for blocks in ([move.src for move in chosen], [move.dst for move in chosen])
            )
            if is_copy and not any(move.delta for move in chosen):
                for layer in layers:
                    layer.kv_cache[dst.long()] = layer.kv_cache[src.long()]
                continue
            deltas = torch.tensor([move.delta for move in chosen])
            rotations = {layer: layer.impl.rotation or _NO_ROTATION for layer in layers}
            cos_sin = {
                rotation: to_device(rotation.cos_sin(deltas), self.device)
                for rotation in {*rotations.values()}
            }
            for layer, rotation in rotations.items():
                reposition_keys(
                    layer.impl.kv_cache_of(layer),
                    src,
                    dst,
                    cos_sin[rotation],
                    rotation.is_neox,
                    impl=layer.impl.kernels,
                    layout=layer.impl.layout,
                    value_size=layer.impl.value_size,
                )


def _started_blocks(output: SchedulerOutput) -> dict[str, Sequence[Sequence[int]]]:
    """Block ids, by KV cache group, of the requests that start, or start again, in a step."""
    cached = output.scheduled_cached_reqs
    resumed = zip(cached.req_ids, cached.new_block_ids, strict=True)
    return {
        **{new.req_id: new.block_ids for new in output.scheduled_new_reqs},
        **{r: blocks for r, blocks in resumed if r in cached.resumed_req_ids},
    }

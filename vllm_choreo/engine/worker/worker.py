# SPDX-License-Identifier: Apache-2.0
"""Mixin of our workers, over vLLM's, on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_choreo.engine.worker.block_bytes import BlockBytes, bytes_of, tensor_of
from vllm_choreo.engine.worker.hidden_memory import HiddenMemory
from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


class ChoreoWorker:
    """Worker of choreographed engines, mixed in before one of vLLM's workers.

    It names our attention backends before the model is loaded, changes the class of the runner,
    and has it prepared once model and cache are there.

    Attributes:
        backends: ours, by vLLM's name for the one that each takes the place of.
    """

    backends: ClassVar[Mapping[AttentionBackendEnum, str]]
    model_runner: RunnerV1 | RunnerV2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Here and not when the plugin is loaded: what else runs with it is as without it.
        for name, path in self.backends.items():
            register_backend(name, path)
        super().__init__(*args, **kwargs)

    @property
    def runner_class(self) -> type[ChoreoModelRunner]:
        """A subclass of the runner that vLLM's worker makes."""
        raise NotImplementedError

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        # vLLM's method names its runner class; the subclass only adds to it.
        self.model_runner.__class__ = self.runner_class

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.runner.prepare_choreography()
        return super().compile_or_warm_up_model()  # type: ignore[misc]

    def determine_available_memory(self) -> int:
        """Extend vLLM's method: leave room for states beside keys and values."""
        return self.runner.memory_for_keys(super().determine_available_memory())  # type: ignore[misc]

    @property
    def runner(self) -> ChoreoModelRunner:
        assert isinstance(self.model_runner, ChoreoModelRunner)
        return self.model_runner

    def choreo_positions(self) -> list[dict[str, Any]]:
        """Rotation, window and sinks of each layer, as plain data, for `vllm-choreo doctor`."""
        layers = {**self.runner.layers, **self.runner.sharing_layers}
        return [
            {**found.describe(), **layers[found.layer].impl.describe()}
            for found in self.runner.layer_positions
        ]

    def choreo_states(self) -> list[dict[str, object]]:
        """Kind and size of the state of each layer that has one, for `vllm-choreo doctor`."""
        return self.runner.states.describe() if self.runner.states is not None else []

    def choreo_state_bytes(self) -> int:
        """Bytes of one state in all layers of this worker; 0: the model has none."""
        return self.runner.states.state_bytes if self.runner.states is not None else 0

    # -- keys and values that are saved and loaded -------------------------------------------

    def choreo_kv_shape(self) -> dict[str, Any]:
        """`BlockBytes.shape`, `hidden`: dtype and size of hidden states, `StateLayers.shape`."""
        model, states = self.runner.vllm_config.model_config, self.runner.states
        hidden = str(model.dtype).removeprefix("torch."), model.get_hidden_size()
        of_state = states.shape() if states is not None else []
        return {**self._block_bytes(in_host=False).shape(), "hidden": hidden, "states": of_state}

    def choreo_read_state(self, number: int, tensors: Sequence[int]) -> bytes:
        """Read the tensors `first … last-1` of a state, one after the other."""
        assert self.runner.states is not None
        return self.runner.states.read(number, range(*tensors))

    def choreo_write_state(
        self, data: bytes | memoryview, number: int, tensors: Sequence[int]
    ) -> None:
        """Write the bytes of `choreo_read_state` where it finds them."""
        assert self.runner.states is not None
        self.runner.states.write(data, number, range(*tensors))

    def choreo_read_kv(
        self, blocks: Sequence[Sequence[int]], parts: Sequence[int], start: int, stop: int
    ) -> bytes:
        """Read keys and values of the KV cache, as `BlockBytes.read` does."""
        first, last = parts
        return self._block_bytes(in_host=False).read(blocks, (first, last), start, stop)

    def choreo_write_kv(
        self,
        data: bytes | memoryview,
        heads: Sequence[int],
        place: tuple[Sequence[Sequence[int]], bool],
        parts: Sequence[int],
        start: int,
        stop: int,
    ) -> None:
        """Write keys and values, as `BlockBytes.write` does.

        Args:
            place: the blocks of each KV cache group, and whether they are of host memory.
        """
        blocks, in_host = place
        first, last = parts
        self._block_bytes(in_host).write(data, heads, blocks, (first, last), start, stop)

    def choreo_read_hidden(self, key: int, layers: Sequence[int], start: int, stop: int) -> bytes:
        """Read the hidden states of `layers`, of tokens `start … stop-1`.

        Bytes of one layer after the other, each `[stop - start, hidden_size]`.
        """
        memory = self._hidden_memory
        return b"".join(bytes_of(memory.rows(key, layer, start, stop)) for layer in layers)

    def choreo_write_hidden(
        self, data: bytes | memoryview, key: int, layers: Sequence[int], start: int, stop: int
    ) -> None:
        """Write the bytes of `choreo_read_hidden` where it finds them."""
        model = self.runner.vllm_config.model_config
        shape = len(layers), stop - start, model.get_hidden_size()
        for layer, rows in zip(layers, tensor_of(data).view(model.dtype).view(shape), strict=True):
            self._hidden_memory.put(key, layer, start, rows)

    @property
    def _hidden_memory(self) -> HiddenMemory:
        assert self.runner.partial_runs is not None, "the scheduler keeps hidden states"
        return self.runner.partial_runs.memory

    def _block_bytes(self, in_host: bool) -> BlockBytes:
        runner, parallel = self.runner, self.runner.vllm_config.parallel_config
        layers = list(runner.layers.values())
        caches = runner.kv_caches_by_layer
        if in_host:
            caches = runner.host_copies_by_layer
        size, impls = parallel.tensor_parallel_size, [layer.impl for layer in layers]
        quantized = [impl.attention.quantized for impl in impls if impl.attention.quantized]
        layout, value_size = impls[0].layout, impls[0].value_size
        return BlockBytes(
            *(caches, layout, parallel.rank % size, size, quantized, value_size),
            [runner.groups[name] for name in runner.layers],
        )

# SPDX-License-Identifier: Apache-2.0
"""Configurations of engines, resolved on a GPU that is not there, without choreography and with it.

For every model the engine's configuration is made as `vllm serve` makes it, and the model itself,
with weights that nobody writes, whose attention layers ask vLLM for their backend. A model that
vLLM serves has to be served with the plugin, by our backends, or refused with the reason that is
declared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu_dry_run.models import MODELS, ServedModel, write_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tools.gpu_dry_run.device import DeviceDouble

_OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 2048, "load_format": "dummy"}


@dataclass(frozen=True)
class Resolved:
    """What became of a model; of an engine that does not start, `error` alone.

    Attributes:
        backends: names of the layers' attention backends.
        kv_dtype: vLLM's name for the dtype of the KV cache.
        cudagraph_mode: CUDA graphs that vLLM captures.
        faults: what is wrong with what was resolved.
        error: why the engine does not start.
    """

    backends: tuple[str, ...] = ()
    kv_dtype: str = ""
    block_size: int = 0
    runner: str = ""
    cudagraph_mode: str = ""
    faults: tuple[str, ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"does not start: {self.error}"
        return (
            f"{' and '.join(self.backends)}, {self.kv_dtype} in blocks of {self.block_size}, "
            f"runner {self.runner}, graphs {self.cudagraph_mode}"
        )


@dataclass(frozen=True)
class Comparison:
    """A model on a GPU: by vLLM alone, and with choreography."""

    gpu: str
    model: str
    without: Resolved
    choreographed: Resolved

    @property
    def key(self) -> str:
        return f"configuration {self.gpu} {self.model}"

    def faults(self) -> Iterator[str]:
        """What is wrong; nothing where vLLM does not serve the model either."""
        refused, error = MODELS[self.model].refused, self.choreographed.error
        if refused is not None:
            if error is None or refused not in error:
                yield f"is not refused with {refused!r}, but {self.choreographed}"
        elif self.without.error is None and error is not None:
            yield f"vLLM serves it ({self.without}), with choreography it {self.choreographed}"
        else:
            yield from self.choreographed.faults


def compare(gpu: str, models: Sequence[str], double: DeviceDouble) -> Iterator[Comparison]:
    """Resolve models on the GPU that this process pretends, whose device is `double`."""
    import vllm_choreo
    from vllm_choreo.engine.worker.gpu_worker import ChoreoGPUWorker

    vllm_choreo.register()
    with tempfile.TemporaryDirectory() as folder, double:
        for name in models:
            path = write_model(name, Path(folder))
            with _plugin(False):
                without = _resolve(path, MODELS[name])
            with _plugin(True), _registered(ChoreoGPUWorker.backends):
                yield Comparison(gpu, name, without, _resolve(path, MODELS[name]))


@contextmanager
def _plugin(is_active: bool) -> Iterator[None]:
    """Let the installed plugin take part in configurations, or not."""
    from vllm_choreo.engine import command_line

    before, command_line.is_active = command_line.is_active, lambda: is_active
    try:
        yield
    finally:
        command_line.is_active = before


@contextmanager
def _registered(backends: Any) -> Iterator[None]:
    """Our backends in place of vLLM's, as a worker of ours registers them."""
    from vllm.v1.attention.backends.registry import register_backend

    for name, path in backends.items():
        register_backend(name, path)
    try:
        yield
    finally:
        for name in backends:
            name.clear_override()


def _resolve(path: Path, model: ServedModel) -> Resolved:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    try:
        config = EngineArgs(str(path), **{**_OPTIONS, **model.options}).create_engine_config()
        layers = _attention_layers(config)
    except Exception as error:  # of any kind: it is the finding
        return Resolved(error=_in_short(error))
    cache_config = config.cache_config
    return Resolved(
        tuple(sorted({layer.attn_backend.get_name() for layer in layers.values()})),
        cache_config.cache_dtype,
        cache_config.block_size,
        "V2" if config.use_v2_model_runner else "V1",
        config.compilation_config.cudagraph_mode.name,
        tuple(_faults(config, layers)),
    )


def _in_short(error: Exception) -> str:
    """The error's kind, and the line of it that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("For further", "1 validation"))]
    return f"{type(error).__name__}: {' '.join(said)[:300]}"


@cache
def _start_groups() -> None:
    """vLLM's process groups, of this process alone."""
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    where = tempfile.mktemp(prefix="gpu-dry-run-")
    init_distributed_environment(1, 0, f"file://{where}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


def _attention_layers(config: VllmConfig) -> dict[str, Any]:
    """Attention layers of the model, whose weights are nowhere."""
    import torch
    from vllm.config import (
        CompilationMode,
        get_layers_from_vllm_config,
        set_current_vllm_config,
    )
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    graphs = config.compilation_config.cudagraph_mode
    config.compilation_config.mode = CompilationMode.NONE  # nothing is run
    with set_current_vllm_config(config):
        _start_groups()
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cuda"):
            initialize_model(config)
    assert config.compilation_config.cudagraph_mode == graphs
    return {
        **get_layers_from_vllm_config(config, Attention),
        **get_layers_from_vllm_config(config, MLAAttention),
    }


def _faults(config: VllmConfig, layers: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a choreographed engine's configuration; of others, nothing."""
    from vllm_choreo.engine.worker.attention import SpanReader
    from vllm_choreo.engine.worker.windows import widen_windows

    if not str(config.scheduler_config.scheduler_cls).startswith("vllm_choreo"):
        return
    others = {type(x.impl).__name__ for x in layers.values() if not isinstance(x.impl, SpanReader)}
    if others:
        yield f"layers with attention that reads no spans: {', '.join(sorted(others))}"
        return
    mode = config.compilation_config.cudagraph_mode
    if mode.has_full_cudagraphs() and not mode.has_piecewise_cudagraphs():
        yield f"graphs {mode.name} leave choreographed steps without any"
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    kinds = {(type(s), s.block_size) for s in widen_windows(specs, config).values() if s}
    if len(kinds) != 1:
        yield f"KV caches of several kinds: {sorted(map(str, kinds))}"

# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, with the choreographing model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_choreo.engine.model_runner import ChoreoCPUModelRunner


class ChoreoCPUWorker(CPUWorker):
    """Names our attention backend before the model is loaded, exchanges the class of the runner,
    and has it prepared once model and cache are there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Here and not when the plugin is loaded: what else runs with it is as without it.
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vllm_choreo.engine.cpu_backend.ChoreoCPUBackend"
        )
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        # vLLM's method names its runner class; the subclass only adds to it.
        self.model_runner.__class__ = ChoreoCPUModelRunner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.runner.prepare_choreography()
        return super().compile_or_warm_up_model()

    @property
    def runner(self) -> ChoreoCPUModelRunner:
        assert isinstance(self.model_runner, ChoreoCPUModelRunner)
        return self.model_runner

    def choreo_positions(self) -> list[dict[str, Any]]:
        """What the position probe found, per layer, as plain data (for `vllm-choreo doctor`)."""
        return [found.describe() for found in self.runner.layer_positions]

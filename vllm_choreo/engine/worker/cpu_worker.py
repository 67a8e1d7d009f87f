# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, with the choreographing model runner."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_choreo.engine.worker.cpu_threads import keep_num_threads
from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.worker import ChoreoWorker


class ChoreoCPUWorker(ChoreoWorker, CPUWorker):
    """Worker of CPU engines, with vLLM's runner V1, or V2 where vLLM has Triton for CPUs."""

    backends = {  # noqa: RUF012
        AttentionBackendEnum.CPU_ATTN: "vllm_choreo.engine.worker.cpu_backend.ChoreoCPUBackend",
        AttentionBackendEnum.CPU_MLA: "vllm_choreo.engine.worker.cpu_backend.ChoreoCPUMLABackend",
    }

    def init_device(self) -> None:
        """Extend vLLM's method: the number of threads stays that of the first engine."""
        super().init_device()
        keep_num_threads()

    @property
    def runner_class(self) -> type[ChoreoModelRunner]:
        if self.use_v2_model_runner:
            from vllm_choreo.engine.worker.v2_runner import ChoreoCPUModelRunnerV2

            return ChoreoCPUModelRunnerV2
        from vllm_choreo.engine.worker.v1_runner import ChoreoCPUModelRunner

        return ChoreoCPUModelRunner

# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker, with the choreographing model runner."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from vllm_choreo.engine.worker.model_runner import ChoreoModelRunner
from vllm_choreo.engine.worker.worker import ChoreoWorker

_BACKENDS = "vllm_choreo.engine.worker.gpu_backends"


class ChoreoGPUWorker(ChoreoWorker, Worker):
    """Worker of engines on NVIDIA GPUs, with vLLM's runner V2 (the default there) or V1."""

    backends = {  # noqa: RUF012
        AttentionBackendEnum.FLASH_ATTN: f"{_BACKENDS}.ChoreoFlashAttentionBackend",
        AttentionBackendEnum.TRITON_ATTN: f"{_BACKENDS}.ChoreoTritonBackend",
        AttentionBackendEnum.TRITON_MLA: f"{_BACKENDS}.ChoreoTritonMLABackend",
    }

    @property
    def runner_class(self) -> type[ChoreoModelRunner]:
        if self.use_v2_model_runner:
            from vllm_choreo.engine.worker.v2_runner import ChoreoGPUModelRunnerV2

            return ChoreoGPUModelRunnerV2
        from vllm_choreo.engine.worker.v1_runner import ChoreoGPUModelRunner

        return ChoreoGPUModelRunner

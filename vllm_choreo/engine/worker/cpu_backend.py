# SPDX-License-Identifier: Apache-2.0
"""The attention backend on CPU: vLLM's own, which hands choreographed batches to our operation."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_choreo.engine.worker.attention import ChoreoImpl
from vllm_choreo.ops import Layout


class ChoreoCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with another implementation class."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return ChoreoCPUImpl


class ChoreoCPUImpl(ChoreoImpl, CPUAttentionBackendImpl):
    """Runs choreographed batches by the C++ kernels; in plain PyTorch where those are missing."""

    layout = Layout.KEYS_TRANSPOSED

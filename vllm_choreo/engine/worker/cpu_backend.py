# SPDX-License-Identifier: Apache-2.0
"""The attention backends on CPU: vLLM's own, which hand choreographed batches to our operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_choreo.engine.worker.attention import ChoreoImpl
from vllm_choreo.engine.worker.mla import ChoreoMLAImpl, ChoreoMLAMetadataBuilder
from vllm_choreo.ops import Layout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class ChoreoCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata builder, with attention kernels whose KV cache we can read.

    On CPUs with AMX vLLM packs bfloat16 keys and values into tiles for `amx`; its kernels `vec` lay
    them out as those for float32 do. Products with weights use AMX all the same.
    """

    isa: str

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class ChoreoCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with another implementation class, and its metadata."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return ChoreoCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return ChoreoCPUMetadataBuilder


class ChoreoCPUImpl(ChoreoImpl, CPUAttentionBackendImpl):
    """Implementation with our C++ kernels; in plain PyTorch where those are missing."""

    layout = Layout.KEYS_TRANSPOSED


class ChoreoCPUMLABackend(CPUMLABackend):
    """vLLM's CPU backend of MLA with another implementation class, and its metadata."""

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        return ChoreoCPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[ChoreoMLAMetadataBuilder]:
        return ChoreoMLAMetadataBuilder


class ChoreoCPUMLAImpl(ChoreoMLAImpl, CPUMLAImpl):
    """Implementation with our C++ kernels; in plain PyTorch where those are missing."""

    # vLLM's gathers what is computed by an operator that CPUs lack.
    reads_context = False

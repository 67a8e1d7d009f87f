# SPDX-License-Identifier: Apache-2.0
"""The attention backends on GPUs: vLLM's own, which hand choreographed batches to our operation.

Their metadata builders, and so their support of CUDA graphs, are vLLM's, or extend them for
batches that read spans: a choreographed step takes no graph that attention is part of (see
`v1_runner.py` and `v2_runner.py`).
"""

from __future__ import annotations

import functools

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_choreo.engine.worker.attention import ChoreoImpl
from vllm_choreo.engine.worker.mla import ChoreoMLAImpl, ChoreoMLAMetadataBuilder
from vllm_choreo.ops import Layout
from vllm_choreo.ops.flash_prefills import FlashAttention


class ChoreoFlashAttentionBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with another implementation class."""

    # A model would store its keys itself, and the position probe would not see them.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return ChoreoFlashAttentionImpl


class ChoreoFlashAttentionImpl(ChoreoImpl, FlashAttentionImpl):
    """Implementation with our Triton kernels, and FlashAttention for long prefills."""

    layout = Layout.SIDE_BY_SIDE
    kernels = "triton"

    def flash_attention(self) -> FlashAttention | None:
        if self.vllm_flash_attn_version is None or self.fa4_hd256:
            return None
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        return functools.partial(flash_attn_varlen_func, fa_version=self.vllm_flash_attn_version)


class ChoreoTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend with another implementation class."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return ChoreoTritonImpl


class ChoreoTritonImpl(ChoreoImpl, TritonAttentionImpl):
    """Implementation with our Triton kernels."""

    layout = Layout.SIDE_BY_SIDE
    kernels = "triton"


class ChoreoTritonMLABackend(TritonMLABackend):
    """vLLM's Triton backend of MLA with another implementation class, and its metadata."""

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        return ChoreoTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        return ChoreoTritonMLAMetadataBuilder


class ChoreoTritonMLAMetadataBuilder(ChoreoMLAMetadataBuilder, TritonMLAMetadataBuilder):
    """vLLM's metadata builder, which sends batches that read spans the absorbed way."""


class ChoreoTritonMLAImpl(ChoreoMLAImpl, TritonMLAImpl):
    """Implementation with our Triton kernels."""

    kernels = "triton"

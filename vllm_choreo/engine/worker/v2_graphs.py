# SPDX-License-Identifier: Apache-2.0
"""Choice of CUDA graphs in vLLM's model runner V2, which may leave full ones out."""

from __future__ import annotations

from functools import cached_property

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager


class GuardedGraphManager(CudaGraphManager):
    """Mixin of graph managers that choose no full CUDA graph while those are not allowed."""

    allow_full = True
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

    def dispatch(self, *args: object, **kwargs: object) -> BatchExecutionDescriptor:
        if self.allow_full:
            return super().dispatch(*args, **kwargs)
        candidates, self._candidates = self._candidates, self._without_full
        try:
            return super().dispatch(*args, **kwargs)
        finally:
            self._candidates = candidates

    @cached_property
    def _without_full(self) -> dict[tuple[int, int], list[BatchExecutionDescriptor]]:
        return {
            key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
            for key, descs in self._candidates.items()
        }

# SPDX-License-Identifier: Apache-2.0
"""Choice of CUDA graphs in vLLM's model runner V2, which may leave some kinds out."""

from __future__ import annotations

from functools import cached_property

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

# Descriptions of graphs, by numbers of tokens and of adapters.
_Candidates = dict[tuple[int, int], list[BatchExecutionDescriptor]]


class GuardedGraphManager(CudaGraphManager):
    """Mixin of graph managers that choose no CUDA graph of a mode above `max_mode`."""

    max_mode = CUDAGraphMode.FULL
    _candidates: _Candidates

    def dispatch(self, *args: object, **kwargs: object) -> BatchExecutionDescriptor:
        if self.max_mode == CUDAGraphMode.FULL:
            return super().dispatch(*args, **kwargs)
        candidates, self._candidates = self._candidates, self._without_full[self.max_mode]
        try:
            return super().dispatch(*args, **kwargs)
        finally:
            self._candidates = candidates

    @cached_property
    def _without_full(self) -> dict[CUDAGraphMode, _Candidates]:
        """Candidates that each lower `max_mode` leaves."""
        piecewise = {
            key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
            for key, descs in self._candidates.items()
        }
        return {CUDAGraphMode.PIECEWISE: piecewise, CUDAGraphMode.NONE: {}}

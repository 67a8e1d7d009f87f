# SPDX-License-Identifier: Apache-2.0
"""Choice of CUDA graphs in vLLM's model runner V2, which may leave some kinds out.

Choreographed steps take none of vLLM's full graphs, which replay its own attention. Where
`full_cuda_graphs` asks for it there is a second set, which replays ours over plans in `PlanRoom`,
for steps in which each request has one query.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CreateForwardFn,
    CudaGraphManager,
    ModelCudaGraphManager,
)

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


class _CaptureOfPlans(CudaGraphManager):
    """Base of `PlannedGraphManager`: behind vLLM's class, whose forward passes it is given."""

    running: Callable[[int], AbstractContextManager[None]]

    def capture(self, create_forward_fn: CreateForwardFn, *args: object, **kwargs: object) -> None:
        """Extend vLLM's method: layers run the plans of each graph's room."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            num_requests = desc.num_reqs
            assert num_requests is not None
            with self.running(num_requests):
                forward = create_forward_fn(desc, warmup)

            def run(mode: CUDAGraphMode) -> None:
                with self.running(num_requests):
                    forward(mode)

            return run

        super().capture(create, *args, **kwargs)


class PlannedGraphManager(ModelCudaGraphManager, _CaptureOfPlans):
    """Full CUDA graphs of choreographed steps in which each request has one query.

    Args:
        running: while it is entered, layers run what a graph of so many requests reads.
    """

    def __init__(
        self,
        running: Callable[[int], AbstractContextManager[None]],
        *args: object,
    ) -> None:
        super().__init__(*args)
        self.running = running

    @property
    def num_requests(self) -> int:
        """The most requests that a graph has."""
        found = self._capture_descs.get(CUDAGraphMode.FULL, [])
        return max((desc.num_reqs or 0 for desc in found), default=0)


class ChoreoCudaGraphManager(GuardedGraphManager, ModelCudaGraphManager):
    """Graph manager that chooses no full CUDA graph of vLLM's while those are not allowed.

    Attributes:
        planned: the second set of full graphs; None: there is none.
        allows_planned: True while a step may take one of these.
        is_planned: whether the step that was dispatched last does.
    """

    planned: PlannedGraphManager | None = None
    allows_planned = False
    is_planned = False

    def capture(self, *args: object, **kwargs: object) -> None:
        super().capture(*args, **kwargs)
        if self.planned is not None:
            told = "Capturing CUDA graphs of choreographed steps"
            self.planned.capture(*args, **{**kwargs, "progress_bar_desc": told})

    def dispatch(self, *args: object, **kwargs: object) -> BatchExecutionDescriptor:
        self.is_planned = False
        if self.allows_planned and self.planned is not None:
            found = self.planned.dispatch(*args, **kwargs)
            self.is_planned = found.cg_mode == CUDAGraphMode.FULL
            if self.is_planned:
                return found
        return super().dispatch(*args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> object:
        if self.is_planned and self.planned is not None:
            return self.planned.run_fullgraph(desc)
        return super().run_fullgraph(desc)

    def release_graphs(self) -> None:
        super().release_graphs()
        if self.planned is not None:
            self.planned.release_graphs()

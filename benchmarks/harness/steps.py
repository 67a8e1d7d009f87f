# SPDX-License-Identifier: Apache-2.0
"""What a cost model needs: the time of each model step, and how fast the machine can be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine import scheduler_of


@dataclass(frozen=True)
class Step:
    """One model step.

    Attributes:
        seconds: that the engine took for it.
        running: requests that run on after it.
        used_blocks: of the KV cache after it.
    """

    seconds: float
    running: int
    used_blocks: int


class StepWatch:
    """While it is entered, times every step of an engine in this process; see `steps`."""

    def __init__(self, llm: Any) -> None:
        self.steps: list[Step] = []
        self._engine = llm.llm_engine
        self._scheduler = scheduler_of(llm)
        self._step: Callable[[], Any] = self._engine.step

    def __enter__(self) -> StepWatch:
        self._engine.step = self._timed_step
        return self

    def __exit__(self, *exc: object) -> None:
        del self._engine.step

    def _timed_step(self) -> Any:
        start = time.perf_counter()
        outputs = self._step()
        seconds = time.perf_counter() - start
        running = len(self._scheduler.running)
        self.steps.append(Step(seconds, running, used_blocks(self._scheduler)))
        return outputs

    def decode_seconds(self, num_running: int) -> list[float]:
        """Of the steps before and after which `num_running` requests ran: decode steps of them."""
        return [
            step.seconds
            for before, step in itertools.pairwise(self.steps)
            if before.running == step.running == num_running
        ]

    def peak_blocks(self) -> int:
        """The most blocks that were in use after a step."""
        return max(step.used_blocks for step in self.steps)


def used_blocks(scheduler: Any) -> int:
    """Blocks of the KV cache that hold what someone may still read."""
    pool = scheduler.kv_cache_manager.block_pool
    # One block of the pool is vLLM's null block, which holds nothing.
    used: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return used


def read_bandwidth(num_bytes: int, repeats: int = 15) -> float:
    """Bytes per second at which all threads together read an array of `num_bytes`: the best time.

    Far beyond the last cache this is the memory's speed; far below, that cache's.
    """
    import torch

    array = torch.ones(num_bytes // 4, dtype=torch.float32)
    passes = max(1, (1 << 28) // num_bytes)  # so long that starting the threads does not count
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(passes):
            array.sum()
        times.append((time.perf_counter() - start) / passes)
    return array.numel() * 4 / min(times)


def multiply_rate(size: int = 2048, repeats: int = 7) -> float:
    """Floating-point operations per second in a product of float32 matrices: the best time.

    By oneDNN, like vLLM's linear layers; torch's default is slower on some machines.
    """
    import torch

    left, right = (torch.rand(size, size).to_mkldnn() for _ in range(2))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)

# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a device, and how fast that device can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.harness.stats import median

Call = Callable[[], object]

# Cycles for which the device is kept busy while the host queues a call, about a millisecond: so
# that the time of the host's launches is not taken for time of the kernels.
_BUSY_CYCLES = 2_000_000


class Clock:
    """Times calls, sides in turn, each from a cold second-level cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(4 * cache, dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def in_turn(self, sides: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
        """Seconds of each repetition, by side; who is first changes from repetition to repetition.

        On a GPU between CUDA events, elsewhere by the clock.
        """
        times: dict[str, list[Callable[[], float]]] = {name: [] for name in sides}
        for call in sides.values():  # compiles, allocates
            call()
        for i in range(repeats):
            for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
                times[name].append(self._time(sides[name]))
        self.synchronize()
        return {name: [found() for found in of_side] for name, of_side in times.items()}

    def _time(self, call: Call) -> Callable[[], float]:
        """Run a call; what it returns tells the seconds once the device has finished."""
        if not self._is_cuda:
            began = time.perf_counter()
            call()
            seconds = time.perf_counter() - began
            return lambda: seconds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)
        self._flush.zero_()
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def host_seconds(self, call: Call, repeats: int, batch: int = 20) -> list[float]:
        """Seconds that the host spends in a call which only queues work; means of `batch` calls."""
        call()
        found = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            for _ in range(batch):
                call()
            found.append((time.perf_counter() - began) / batch)
        self.synchronize()
        return found


@dataclass(frozen=True)
class Floors:
    """How fast the device is, measured in this run.

    Attributes:
        copy_rate: bytes per second, read and written, in a copy far larger than any cache.
        multiply_rate: operations per second in a product of square bfloat16 matrices.
    """

    copy_rate: float
    multiply_rate: float

    def seconds(self, num_bytes: float, operations: float) -> float:
        """The least time for both."""
        return max(num_bytes / self.copy_rate, operations / self.multiply_rate)


def measure_floors(clock: Clock, repeats: int) -> Floors:
    is_cuda = clock.device.type == "cuda"
    size, side = (1 << 30, 8192) if is_cuda else (1 << 20, 64)
    source = torch.ones(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, side, side, device=clock.device).bfloat16()
    calls = {"copy": lambda: target.copy_(source), "multiply": lambda: left @ right}
    found = {name: median(times) for name, times in clock.in_turn(calls, repeats).items()}
    return Floors(2 * size / found["copy"], 2 * side**3 / found["multiply"])

# SPDX-License-Identifier: Apache-2.0
"""How tiles are launched: warps, registers, and how many programs a multiprocessor then holds.

By what `make gpu-check` says of them, which also holds `TileTuning.num_programs` to be true. A
program loads a chunk, waits, and computes with it: so what counts in decoding is how many run side
by side, and what counts in prefilling is how few instructions a chunk takes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from vllm_choreo.ops.tiles import MIN_ROWS

_MIDDLE_ROWS = 4 * MIN_ROWS


@dataclass(frozen=True)
class TileTuning:
    """Choice of how tiles of some rows are launched.

    Attributes:
        num_warps: warps of a program.
        max_registers: registers of a thread; None: as many as the compiler likes.
        num_programs: programs that a multiprocessor holds at least.
    """

    num_warps: int
    max_registers: int | None
    num_programs: int

    def options(self) -> dict[str, int]:
        """Keyword arguments of the launch."""
        given = {"num_warps": self.num_warps}
        return given if self.max_registers is None else {**given, "maxnreg": self.max_registers}


def tuning_of(num_rows: int, row_bytes: int, itemsize: int, arch: int) -> TileTuning:
    """Choose how tiles are launched.

    Args:
        row_bytes: bytes of a query's head, padded to a power of two.
        itemsize: bytes of a number of it. Float32 spills in the loop if it has four warps.
        arch: compute capability without the point; 0: the interpreter.
    """
    is_lean = arch in (80, 90) and row_bytes <= 256 and itemsize == 2
    if num_rows == MIN_ROWS:
        if is_lean:
            return TileTuning(4, 128, 4)
        return TileTuning(4, None, 2 if row_bytes <= 256 else 1)
    if num_rows == _MIDDLE_ROWS and is_lean:
        # wgmma takes 64 rows to a group of four warps: of two groups both would compute all of it.
        return TileTuning(4, None, 2)
    return TileTuning(8, None, 1)


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability without the point of the device that kernels are compiled for; or 0."""
    if triton.knobs.runtime.interpret:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)

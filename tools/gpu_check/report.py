# SPDX-License-Identifier: Apache-2.0
"""A line for each compiled kernel, what is wrong with it, and what has become worse."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from tools.gpu_check.launches import Launch
from tools.gpu_check.machine_code import (
    assemble,
    count,
    disassemble,
    features,
    main_loop,
    operations,
)
from tools.gpu_check.shapes import SHAPES
from vllm_choreo.ops.triton.tuning import tuning_of

BASELINE = Path(__file__).with_name("baseline.csv")
KIB = 1024
# A loop may grow by so much before it counts as worse: releases of ptxas differ.
_LOOP_SLACK = 1.02


@dataclass(frozen=True)
class GPU:
    """Limits of a compute capability (CUDA C++ programming guide, "Technical Specifications").

    Attributes:
        processor_bytes, program_bytes: shared memory of a multiprocessor, and of a program.
        threads, registers: of a multiprocessor.
    """

    processor_bytes: int
    program_bytes: int
    threads: int
    registers: int = 65536

    def num_programs(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many programs a multiprocessor holds; registers go by 256 to a warp."""
        warps = threads // 32
        of_warp = -(-registers * 32 // 256) * 256
        by_registers = self.registers // max(of_warp, 1) // warps
        by_shared = self.processor_bytes // (shared_bytes + KIB)  # the system keeps 1 KiB of each
        return min(by_registers, self.threads // threads, by_shared, 32)


GPUS = {
    80: GPU(164 * KIB, 163 * KIB, 2048),  # A100
    89: GPU(100 * KIB, 99 * KIB, 1536),  # L4, L40S, RTX 40
    90: GPU(228 * KIB, 227 * KIB, 2048),  # H100, H200
    100: GPU(228 * KIB, 227 * KIB, 2048),  # B200
    120: GPU(100 * KIB, 99 * KIB, 1536),  # RTX 50, RTX PRO 6000
}


@dataclass(frozen=True)
class KernelReport:
    """What the compiler made of a kernel, for one GPU and one shape of attention.

    Attributes:
        arch: compute capability without the point.
        shape: of `SHAPES`.
        rows: queries times heads of a tile; 0: it has none.
        chunk: tokens that it reads at a time, likewise.
        registers, spill_bytes: of a thread.
        shared_bytes: of a program.
        programs: that a multiprocessor holds.
        loop: operations of the inner loop, over one chunk; of them those of tensor cores, of global
            and of local memory (spills), and barriers.
        serialized: places where products wait for one another, by the compiler's own remarks.
        has: what of tensor cores and asynchronous copies it uses.
    """

    arch: int
    shape: str
    kernel: str
    rows: int
    chunk: int
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs: int
    loop: int
    loop_mma: int
    loop_global: int
    loop_local: int
    loop_barrier: int
    serialized: int
    has: str

    @property
    def key(self) -> tuple[int, str, str, int]:
        return self.arch, self.shape, self.kernel, self.rows

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.shape} {self.kernel} {self.rows or ''}".rstrip()


def report_on(launch: Launch, shape: str, arch: int) -> tuple[KernelReport, list[str]]:
    """Report on a compiled launch, and what is wrong with it whatever it was before."""
    compiled = launch.compiled
    assert isinstance(compiled, CompiledKernel)
    assembled = assemble(compiled.asm["ptx"], arch)
    lines = disassemble(compiled.asm["cubin"], arch)
    loop, threads, gpu = main_loop(lines), 32 * compiled.metadata.num_warps, GPUS[arch]
    shared = compiled.metadata.shared
    report = KernelReport(
        arch,
        shape,
        launch.kernel,
        launch.constants.get("NUM_ROWS", 0),
        launch.constants.get("CHUNK", 0),
        threads,
        assembled.registers,
        assembled.spill_bytes,
        shared,
        gpu.num_programs(threads, assembled.registers, shared),
        len(loop),
        *(count(loop, kind) for kind in ("mma", "global", "local", "barrier")),
        len(assembled.serialized),
        features(operations(lines)),
    )
    faults = list[str]()
    if shared > gpu.program_bytes:
        faults.append(f"{report}: {shared} bytes of shared memory, of {gpu.program_bytes}")
    if not report.programs:
        faults.append(f"{report}: no multiprocessor holds a program of it")
    if launch.kernel == "attend_tiles":
        itemsize = SHAPES[shape].dtype.itemsize
        row_bytes = triton.next_power_of_2(SHAPES[shape].head_size) * itemsize
        planned = tuning_of(report.rows, row_bytes, itemsize, arch).num_programs
        if report.programs < planned:
            faults.append(
                f"{report}: a multiprocessor holds {report.programs} programs, work is split for "
                f"{planned} (vllm_choreo/ops/triton/tuning.py)"
            )
    is_16_bit = SHAPES[shape].dtype.itemsize == 2
    if launch.kernel == "attend_tiles" and is_16_bit and not count(operations(lines), "mma"):
        faults.append(f"{report}: 16-bit products without tensor cores")
    return report, faults


def worse_than(before: KernelReport, now: KernelReport) -> list[str]:
    """What is worse of a kernel than it was."""
    grown = {
        "bytes of spills": (before.spill_bytes, now.spill_bytes),
        "accesses to spills in its loop": (before.loop_local, now.loop_local),
        "places where products wait for one another": (before.serialized, now.serialized),
        "operations in its loop": (int(before.loop * _LOOP_SLACK), now.loop),
    }
    faults = [
        f"{now}: {new} {what}, {old} before" for what, (old, new) in grown.items() if new > old
    ]
    if now.programs < before.programs:
        faults.append(
            f"{now}: a multiprocessor holds {now.programs} programs of it, {before.programs} before"
        )
    return faults


def read_baseline(path: Path = BASELINE) -> dict[tuple[int, str, str, int], KernelReport]:
    """Reports of the kernels as they were, by `KernelReport.key`; none if nobody wrote them."""
    if not path.exists():
        return {}
    kinds = {field.name: str if field.type == "str" else int for field in _FIELDS}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            KernelReport(**{name: kind(row[name]) for name, kind in kinds.items()})
            for row in csv.DictReader(file)
        ]
    return {row.key: row for row in rows}


def write_baseline(reports: Iterable[KernelReport], path: Path = BASELINE) -> None:
    """Write the reports that later ones are compared with."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in _FIELDS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(report) for report in sorted(reports, key=lambda r: r.key))


def table(reports: Sequence[KernelReport]) -> str:
    """A table of the reports, a line each."""
    names = [f.name for f in _FIELDS]
    cells = [names, *([str(getattr(report, name)) for name in names] for report in reports)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


_FIELDS = fields(KernelReport)

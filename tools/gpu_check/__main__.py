# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for NVIDIA GPUs that need not be there, and compare with before.

    make gpu-check
    make gpu-check ARGS="--arch 90 --shape llama-8b gpt-oss --table"
    make gpu-check ARGS=--write                        these are the figures to compare with now

Kernels are compiled by the very calls that launch them; ptxas and its disassembler are Triton's.
Exit status 1: a kernel does not compile, does not fit, multiplies 16-bit numbers without tensor
cores, or takes more than it did: spills, operations of its inner loop, places of a multiprocessor.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from itertools import product

os.environ.pop("TRITON_INTERPRET", None)  # Triton looks for it when it is imported

from tools.gpu_check.launches import compile_launches
from tools.gpu_check.report import (
    BASELINE,
    GPUS,
    KernelReport,
    read_baseline,
    report_on,
    table,
    worse_than,
    write_baseline,
)
from tools.gpu_check.shapes import SHAPES


def main() -> int:
    arguments = _arguments()
    reports, faults = _compile(arguments.arch, arguments.shape)
    baseline = read_baseline()
    if arguments.write:
        write_baseline({**baseline, **{report.key: report for report in reports}}.values())
    else:
        faults += [fault for report in reports for fault in _compared(report, baseline)]
    if arguments.table:
        print(table(reports))
    spilling = sum(report.spill_bytes > 0 for report in reports)
    print(f"{len(reports)} kernels compiled, {spilling} of them spill; {len(faults)} faults")
    for fault in faults:
        print(f"  {fault}")
    return int(bool(faults))


def _compile(archs: list[int], shapes: list[str]) -> tuple[list[KernelReport], list[str]]:
    """Reports and faults of all kernels; progress goes to standard error."""
    start = time.monotonic()
    reports, faults = list[KernelReport](), list[str]()
    for arch, shape in product(archs, shapes):
        for launch in compile_launches(SHAPES[shape], arch):
            if isinstance(launch.compiled, Exception):
                error = f"{type(launch.compiled).__name__}: {launch.compiled}"
                faults.append(f"sm_{arch} {shape} {launch.kernel}: {error[:400]}")
                continue
            report, wrong = report_on(launch, shape, arch)
            reports.append(report)
            faults += wrong
        seconds = time.monotonic() - start
        print(f"[{seconds:4.0f} s] sm_{arch} {shape}: {len(reports)} kernels", file=sys.stderr)
    return reports, faults


def _compared(report: KernelReport, baseline: Mapping[object, KernelReport]) -> list[str]:
    """What is worse of a kernel than in the baseline, which has it."""
    if report.key in baseline:
        return worse_than(baseline[report.key], report)
    return [f"{report}: not in {BASELINE.name}; look at it (--table), then --write"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        *("--arch", "--target"), type=int, nargs="+", default=[*GPUS], choices=GPUS, metavar="N"
    )
    parser.add_argument("--shape", nargs="+", default=[*SHAPES], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--table", action="store_true", help="print what was made of each kernel")
    parser.add_argument("--write", action="store_true", help=f"write {BASELINE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

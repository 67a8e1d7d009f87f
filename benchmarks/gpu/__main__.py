# SPDX-License-Identifier: Apache-2.0
"""Check and time the GPU kernels, and workflows on them, without vLLM. From a checkout:

    python -m benchmarks.gpu                    all parts at full shapes, on the first CUDA device
    python -m benchmarks.gpu check attention    some of them
    python -m benchmarks.gpu --device cpu --shapes tiny

Needs torch >= 2.10, Triton >= 3.5 and numpy; compares with xformers if it is installed. The last
form runs everything in Triton's interpreter: a dry run, which proves the logic, measures nothing,
and says so in the name of every file.

    check       every kernel on fresh random inputs, against a computation in float64
    attention   decode and prefill, repositioning, planning and launching: against PyTorch's
                attention, FlexAttention, xformers, and the floors of this machine
    step        whole workflows on a transformer with random weights, choreographed and encoded
                again with a prefix cache

Every part writes its CSV files row by row, and summary.md after every bar: a run that is cut off
keeps what it found. Exit status: 0; 1 if a result is wrong; 3 if all are right and a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

PARTS = ("check", "attention", "step")


def main() -> int:
    args = _arguments()
    if args.device == "cpu":
        # Triton decides on import whether it compiles or interprets.
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu import attention, check, step
    from benchmarks.gpu.report import Report

    report = Report(Path(args.out), args.device)
    parts = {"check": check.run, "attention": attention.run, "step": step.run}
    for name in args.parts or PARTS:
        report.say(f"== {name}")
        try:
            parts[name](report, args)
        except Exception as error:  # the other parts still run, and what was found is kept
            traceback.print_exc()
            report.error(f"{name} broke off: {type(error).__name__}: {error}")
    report.write_summary(is_done=True)
    print(report.summary())
    return report.status()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="check, attention, step; all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda",
                        help="the first CUDA device; or cpu for a dry run")  # fmt: skip
    parser.add_argument("--shapes", choices=["full", "tiny"], default="full")
    parser.add_argument("--out", default="gpu-out", help="folder of the CSV files and summary.md")
    parser.add_argument("--repeats", type=int, help="of each timed call; 30, tiny: 2")
    parser.add_argument("--seed", type=int, help="of the inputs; a new one each run")
    parser.add_argument("--workers", type=int,
                        help="processes of check; half the cores, 8 at most, on CPU 1")  # fmt: skip
    parser.add_argument("--rival-seconds", type=float, default=150.0,
                        help="to compile FlexAttention and xformers; then without")  # fmt: skip
    parser.add_argument("--workflow-repeats", type=int, help="5 of each; tiny: 1")
    parser.add_argument("--no-graphs", action="store_true", help="step launches every kernel")
    parser.add_argument("--layers", type=int, help="of the transformer; 32, tiny: 2")
    args = parser.parse_args()
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if args.device == "cpu" and args.shapes != "tiny":
        parser.error("--device cpu interprets the kernels, which takes --shapes tiny")
    is_tiny = args.shapes == "tiny"
    args.repeats = args.repeats or (2 if is_tiny else 30)
    args.workflow_repeats = args.workflow_repeats or (1 if is_tiny else 5)
    args.seed = int.from_bytes(os.urandom(3)) if args.seed is None else args.seed
    return args


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: what is read out of machine code, and what counts as worse than before."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from tests.grids import sampled
from tests.repository.pages import ROOT
from tools.gpu_check.machine_code import count, features, main_loop, operations
from tools.gpu_check.report import GPUS, KernelReport, read_baseline, worse_than, write_baseline
from tools.gpu_check.shapes import SHAPES

# Two loops, the second in a third one; the first has no products.
_CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R4, [R2] ;
        /*0020*/              @P0  BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   IADD3 R0, R0, 0x1, RZ ;
.L_x_2:
        /*0040*/                   LDGSTS.E [R3], [R2] ;
        /*0050*/             @!UP1 HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0060*/                   LDL R9, [R1+0x8] ;
        /*0070*/              @P1  BRA `(.L_x_2) ;
        /*0080*/              @P2  BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
""".split("\n")
_REPORT = KernelReport(
    *(90, "llama-8b", "attend_tiles", 16, 64, 128, 197, 0, 43520, 2, 573, 32, 18, 0, 14, 0),
    "cp.async mma",
)


def test_the_loop_with_the_products_is_the_one_that_is_judged() -> None:
    loop = main_loop(_CODE)
    assert loop == ["LDGSTS", "HMMA", "LDL"]
    assert [count(loop, kind) for kind in ("mma", "global", "local", "barrier")] == [1, 1, 1, 0]
    assert main_loop(_CODE[:5]) == ["LDG"] and main_loop([]) == []
    assert len(operations(_CODE)) == 10
    assert features(operations(_CODE)) == "cp.async mma"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"spill_bytes": 8}, "8 bytes of spills, 0 before"),
        ({"loop_local": 1}, "1 accesses to spills in its loop, 0 before"),
        ({"serialized": 1}, "1 places where products wait for one another, 0 before"),
        ({"programs": 1}, "a multiprocessor holds 1 programs of it, 2 before"),
        ({"loop": 600}, "600 operations in its loop, 584 before"),
    ],
)
def test_what_takes_more_than_before_is_a_fault(changed: dict[str, int], what: str) -> None:
    (fault,) = worse_than(_REPORT, replace(_REPORT, **changed))
    assert fault.startswith("sm_90 llama-8b attend_tiles 16: ") and what in fault
    better = {name: -value for name, value in changed.items() if name != "programs"}
    assert worse_than(_REPORT, replace(_REPORT, **better)) == []


def test_a_multiprocessor_holds_what_registers_threads_and_memory_allow() -> None:
    gpu = GPUS[90]
    assert gpu.num_programs(128, 197, 43520) == 2  # by registers: 200 of them to a thread
    assert gpu.num_programs(128, 32, 0) == 16  # by threads
    assert gpu.num_programs(128, 32, 100 * 1024) == 2  # by shared memory


def test_what_is_compared_with_is_there_for_every_gpu_and_shape(tmp_path) -> None:
    baseline = read_baseline()
    assert {key[:2] for key in baseline} == set(product(GPUS, SHAPES))
    write_baseline(baseline.values(), tmp_path / "baseline.csv")
    assert read_baseline(tmp_path / "baseline.csv") == baseline
    assert read_baseline(tmp_path / "nowhere.csv") == {}


@pytest.mark.parametrize("arch", sampled(["90", "80", "100"], 0, 1))
def test_kernels_compile_and_take_no_more_than_before(arch: str) -> None:
    """In a process of its own: in this one they are interpreted. `make gpu-check` compiles all."""
    shapes = ("llama-8b", "llama-8b-fp32", "gemma-2-9b-window", "gpt-oss", "phi-2", "bloom")
    command = [sys.executable, "-m", "tools.gpu_check", "--arch", arch, "--shape", *shapes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled" in done.stdout and done.stdout.rstrip().endswith("0 faults")

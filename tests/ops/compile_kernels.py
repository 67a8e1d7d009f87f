# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for an NVIDIA GPU that need not be there, by real calls.

    python -m tests.ops.compile_kernels ARCH        (80, 89, 90, ... : sm_ARCH)

Prints a line of JSON per kernel: what was called, and bytes of shared memory of a program.
"""

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.ops.cases import ints, make_case, make_rotation
from vllm_choreo.ops import Layout, reposition_keys, span_attention

# Decode (the smallest tiles), a few rows, a prefill (the largest); with partial results.
REQUESTS = [(1, 300, [700, 700, 700]), (9, 2, [20]), (200, 0, [])]
CASES = [
    {"head_size": 64},
    {"head_size": 128, "group_heads": 4},
    {"head_size": 256, "group_heads": 4},
    {"head_size": 128, "dtype": torch.float16},
    {"head_size": 256, "dtype": torch.float32},
    {"head_size": 80, "rotary_dim": 32, "is_neox": False},
    {"softcap": 30.0},
    {"alibi": True, "rotary_dim": 0},
    {"window": 100, "sinks": True},
    {"reweighted": True},
]


class AbsentGPU:
    """As much of a driver of Triton's as compiling takes."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(arch: int) -> None:
    triton.runtime.driver.set_active(AbsentGPU(arch))
    compiled = []

    def compile_only(kernel, grid):
        def launch(*args, **kwargs):
            compiled.append((kernel.__name__, kernel.run(*args, grid=grid, warmup=True, **kwargs)))

        return launch

    JITFunction.__getitem__ = compile_only
    for options in CASES:
        case = make_case(1, REQUESTS, block_size=16, **{"dtype": torch.bfloat16, **options})
        case.layout = Layout.SIDE_BY_SIDE
        span_attention(
            case.query, case.kv_cache, torch.empty_like(case.query), case.plan(), case.layer(),
            "triton",
        )  # fmt: skip
        cos_sin = make_rotation(case.rotation.rotary_dim, True).cos_sin(ints([5]))
        reposition_keys(case.kv_cache, ints([1]), ints([2]), cos_sin, True, "triton", case.layout)
        for name, kernel in compiled:
            print(json.dumps({
                "kernel": name, **{key: str(value) for key, value in options.items()},
                "shared": kernel.metadata.shared, "cubin": len(kernel.asm["cubin"]),
            }), flush=True)  # fmt: skip
        compiled.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]))

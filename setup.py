# SPDX-License-Identifier: Apache-2.0
"""Builds the optional C++ extension; everything else is in pyproject.toml.

Without a compiler, with one that fails, without torch in the build environment, or with
CHOREO_SKIP_EXT=1 the package is installed without it. GPUs never need it; on CPUs attention then
runs in plain PyTorch, many times slower, and says so when it starts.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

SOURCES = Path("csrc/cpu")
ADVICE = (
    "GPUs do without them. For CPUs install g++, then: pip install --no-build-isolation . "
    "(in a checkout: make setup)"
)


def skip_reason() -> str | None:
    """Why the extension cannot be built here, or None."""
    if os.environ.get("CHOREO_SKIP_EXT") == "1":
        return "CHOREO_SKIP_EXT=1"
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not in the build environment (use pip's --no-build-isolation)"
    compiler = os.environ.get("CXX", "c++")
    program = compiler.split()[0]
    if shutil.which(program) is None:
        return f"no C++ compiler {compiler!r}"
    try:
        subprocess.run([program, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the C++ compiler {compiler!r} does not run ({error})"
    return None


def extension_arguments() -> dict:
    """Arguments of setup() that build the extension; none where that is not possible."""
    reason = skip_reason()
    if reason is not None:
        print(f"vllm_choreo: not building the C++ kernels: {reason}. {ADVICE}", file=sys.stderr)
        return {}
    from setuptools.errors import CompileError
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class OptionalBuild(BuildExtension):
        """Torch's build, whose errors are of a kind that setuptools lets an optional one have."""

        def build_extension(self, ext):
            try:
                super().build_extension(ext)
            except RuntimeError as error:  # of ninja
                raise CompileError(f"{error}. {ADVICE}") from error

    extension = CppExtension(
        "vllm_choreo._C",
        sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
        depends=sorted(str(path) for path in SOURCES.glob("*.h")),
        # -fopenmp when compiling only: linking with it would load the system's OpenMP runtime
        # beside the one that torch ships. Its symbols resolve through libtorch_cpu.
        # -Wno-maybe-uninitialized: GCC 12's own intrinsics headers set it off.
        # -fno-wrapv: Python's own flags bring -fwrapv, which costs a decode step a quarter.
        extra_compile_args=[
            "-O3", "-fno-wrapv", "-fopenmp", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall",
            "-Wextra", "-Wno-psabi", "-Wno-unused-parameter", "-Wno-maybe-uninitialized",
        ],
        # A compiler that fails must not fail the installation; see OptionalBuild.
        optional=True,
    )  # fmt: skip
    # Objects that change with a header are rebuilt only by ninja or by --force.
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(**extension_arguments())

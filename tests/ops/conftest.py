# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_choreo.ops import cpu

BUILT = cpu.unavailable_reason() is None
ISAS = cpu.available_isas() if BUILT else []


def chosen(name):
    """The implementation of that name; kernels of an instruction set for the time of a test."""
    if name == "none":
        pytest.skip(f"the C++ kernels are not built: {cpu.unavailable_reason()}")
    if name not in ISAS:
        yield name
        return
    cpu.use_isa(name)
    yield "cpu"
    cpu.use_isa(None)


@pytest.fixture(params=["reference", *ISAS, "triton"])
def impl(request):
    """Every implementation that this machine runs."""
    yield from chosen(request.param)


@pytest.fixture(params=[*ISAS, "triton"])
def kernel(request):
    """Every implementation but the reference."""
    yield from chosen(request.param)


@pytest.fixture(params=ISAS or ["none"])
def cpu_kernel(request):
    """Every instruction set of the C++ kernels."""
    yield from chosen(request.param)

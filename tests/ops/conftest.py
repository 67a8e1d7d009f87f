# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_choreo.ops import cpu

BUILT = cpu.unavailable_reason() is None
ISAS = cpu.available_isas() if BUILT else []


@pytest.fixture(params=["reference", *ISAS])
def impl(request):
    """Every implementation that this machine runs; kernels are chosen for the time of the test."""
    if request.param == "reference":
        yield "reference"
        return
    cpu.use_isa(request.param)
    yield "cpu"
    cpu.use_isa(None)


@pytest.fixture(params=ISAS or ["none"])
def kernel(request):
    """Every instruction set of the C++ kernels."""
    if not BUILT:
        pytest.skip(f"the C++ kernels are not built: {cpu.unavailable_reason()}")
    cpu.use_isa(request.param)
    yield "cpu"
    cpu.use_isa(None)

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm_choreo.ops import cpu

# Triton's interpreter is a hundred times slower than the C++ kernels. It runs every variant in
# float32, and these alone in bfloat16; of the head sizes these.
_IN_BFLOAT16 = {"plain"}
_IN_8_BITS = ("plain", "window, alibi and softcap", "reweighted, softcap and sinks")
_HEAD_SIZES = {48, 128, 256}

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark exhaustive what the interpreter need not run in every run."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("kernel") != "triton":
            continue
        in_full = params.get("dtype") is not torch.bfloat16 or params.get("variant") in _IN_BFLOAT16
        # How bytes are read does not depend on the variant: a few show it.
        is_few = "fmt" not in params or (
            params["fmt"] is torch.float8_e4m3fn and params.get("variant", "plain") in _IN_8_BITS
        )
        if not (in_full and is_few) or params.get("head_size", 128) not in _HEAD_SIZES:
            item.add_marker(pytest.mark.exhaustive)


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

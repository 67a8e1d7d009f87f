# SPDX-License-Identifier: Apache-2.0
from collections import Counter

import pytest
import torch

from vllm_choreo.ops import cpu

# Triton's interpreter is a hundred times slower than the C++ kernels. Of the cases of a law it runs
# every fourth in every run; fewer where a case takes many seconds, and of caches in 8 bits, which
# are read by the same code once a byte has become a number. Exhaustive are three times as many.
_EVERY = {"test_fp8.py": 48, "test_sharing.py": 24, "test_span_attention.py": 16}
_EVERY_OF_OTHERS = 4

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
    """Mark exhaustive, or nightly, what the interpreter need not run in every run."""
    if torch.cuda.is_available():
        return
    num_cases = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "triton" not in (params.get("kernel"), params.get("impl")):
            continue
        law = item.path, item.originalname
        every = _EVERY.get(item.path.name, _EVERY_OF_OTHERS)
        if num_cases[law] % every:
            is_nightly = num_cases[law] % max(2, every // 3)
            item.add_marker(pytest.mark.nightly if is_nightly else pytest.mark.exhaustive)
        num_cases[law] += 1


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

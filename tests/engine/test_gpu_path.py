# SPDX-License-Identifier: Apache-2.0
"""What a GPU engine runs, in Triton's interpreter: runners, schedulers, backends, kernels, graphs.

Each case is a process of its own, since Triton and vLLM decide at import what they run on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo.testing.models.pictured import PICTURED_MODELS

BLOCK_GIB = 3 * 2 * 32 * 2 * 32 * 4 / 2**30  # of the tiny model, see test_tiers.py
TRITON = "ChoreoTritonBackend"
# The default on GPUs; the older runner, which moves keys; the new one on CPU, with little memory;
# with MLA, with positions in rows (M-RoPE), with pictures, and with layers that have states.
CASES: dict[str, dict[str, Any]] = {
    "default": {
        "runner": "v2",
        "backend": TRITON,
        "is_async": True,
        "settings": {"hidden_memory_gib": 0.01},
        "seeds": [0],
    },
    "v1": {
        "runner": "v1",
        "backend": TRITON,
        "is_async": True,
        "settings": {"reposition": "in_place", "hidden_memory_gib": 0.01},
        "seeds": [],
    },
    "cpu": {
        "runner": "v2",
        "backend": None,
        "is_async": False,
        "settings": {"host_memory_gib": 200 * BLOCK_GIB, "hidden_memory_gib": 0.01},
        "seeds": [*range(4)],
        "num_blocks": 66,
    },
    "flash prefills": {
        "runner": "v2",
        "backend": TRITON,
        "is_async": True,
        "settings": {"flash_prefills": True, "hidden_memory_gib": 0.01},
        "seeds": [0, 1],
        "flash": True,
    },
    "mla": {
        "model": "deepseek_v3",
        "runner": "v2",
        "backend": "ChoreoTritonMLABackend",
        "is_async": True,
        "settings": {"hidden_memory_gib": 0.01},
        "seeds": [0],
    },
    "mla, v1": {
        "model": "deepseek_v2",
        "runner": "v1",
        "backend": "ChoreoTritonMLABackend",
        "is_async": True,
        "settings": {"reposition": "in_place"},
        "seeds": [1],
    },
    "m-rope": {
        "model": "paddleocr_vl",
        "runner": "v2",
        "backend": TRITON,
        "is_async": True,
        "settings": {},
        "seeds": [0],
    },
    "pictures": {
        "model": "idefics3",
        "runner": "v2",
        "backend": TRITON,
        "is_async": True,
        "settings": {},
        "seeds": [0],
        "pictures": True,
    },
    "pictures, m-rope": {
        "model": "paddleocr_vl_pictured",
        "runner": "v2",
        "backend": None,
        "is_async": False,
        "settings": {},
        "seeds": [*range(4)],
        "pictures": True,
    },
    "states": {
        "model": "granite_hybrid",
        "runner": "v2",
        "backend": None,
        "is_async": False,
        "settings": {"composed_states": True},
        "seeds": [0],
    },
}
EXPECTED = {
    "default": ("ChoreoCPUModelRunnerV2", "ChoreoAsyncScheduler", ["ChoreoTritonImpl"]),
    "v1": ("ChoreoCPUModelRunner", "ChoreoAsyncScheduler", ["ChoreoTritonImpl"]),
    "cpu": ("ChoreoCPUModelRunnerV2", "ChoreoScheduler", ["ChoreoCPUImpl"]),
    "flash prefills": ("ChoreoCPUModelRunnerV2", "ChoreoAsyncScheduler", ["ChoreoTritonImpl"]),
    "mla": ("ChoreoCPUModelRunnerV2", "ChoreoAsyncScheduler", ["ChoreoTritonMLAImpl"]),
    "mla, v1": ("ChoreoCPUModelRunner", "ChoreoAsyncScheduler", ["ChoreoTritonMLAImpl"]),
    "m-rope": ("ChoreoCPUModelRunnerV2", "ChoreoAsyncScheduler", ["ChoreoTritonImpl"]),
    "pictures": ("ChoreoCPUModelRunnerV2", "ChoreoAsyncScheduler", ["ChoreoTritonImpl"]),
    "pictures, m-rope": ("ChoreoCPUModelRunnerV2", "ChoreoScheduler", ["ChoreoCPUImpl"]),
    "states": ("ChoreoCPUModelRunnerV2", "ChoreoScheduler", ["ChoreoCPUImpl"]),
}


def run(model_path: Path, choices: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.interpreted", str(model_path)]
    ended = subprocess.run(
        [*command, json.dumps(choices)], capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # interpreted, beside other tests on a slow machine
@pytest.mark.parametrize("case", sorted(CASES))
def test_random_choreographies(
    case: str, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Compared with the oracle in that process; here, that it ran what it should."""
    pytest.importorskip("triton")
    model = CASES[case].get("model", "llama")
    make = PICTURED_MODELS.get(model)
    report = run(tiny_model_path(model) if make is None else make(tmp_path), CASES[case])
    assert (report["runner"], report["scheduler"], report["impls"]) == EXPECTED[case]
    choreographed = {mode for reads_spans, mode, _ in report["steps"] if reads_spans}
    ordinary = {mode for reads_spans, mode, _ in report["steps"] if not reads_spans}
    taken = [num_requests for *_, num_requests in report["steps"] if num_requests]
    assert bool(taken) == CASES[case].get("flash", False)
    assert choreographed == {"PIECEWISE", "NONE"}
    assert "FULL" in ordinary
    if case == "cpu":
        assert report["restored"] >= 5

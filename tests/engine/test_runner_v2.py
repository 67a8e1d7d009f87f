# SPDX-License-Identifier: Apache-2.0
"""What holds on vLLM's model runner V1 holds on V2: other files' tests, run there on CPU.

Each case is a process of its own, since vLLM decides at import on which runner it runs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.feature_machine.configurations import ON_V2
from tests.grids import sampled

# Of random programs, half a minute each where Triton is interpreted.
_SEEDS = ["0:8", *(f"{first}:{first + 23}" for first in range(8, 100, 23))]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1, 1))
@pytest.mark.parametrize("name", ON_V2)
def test_programs_on_the_new_runner(name: str, seeds: str) -> None:
    """In a process of its own, on vLLM's model runner V2."""
    pytest.importorskip("triton")
    chosen = ["--configuration", name, "--seeds", seeds, "--shrink-seconds", "0"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.feature_machine", *chosen],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("subject", sampled(["eagle", "llama", "ministral3", "moved"], 2, 2))
def test_drafters_draft_on_the_new_runner(subject: str) -> None:
    """The tests of drafters with layers hold there, with asynchronous scheduling."""
    pytest.importorskip("triton")
    tests = ["tests/engine/test_drafters.py", "-q", "-k", f"[{subject}]"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.interpreted_tests", *tests],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "4 passed" in ended.stdout, ended.stdout[-4000:]

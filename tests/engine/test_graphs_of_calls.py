# SPDX-License-Identifier: Apache-2.0
"""Full CUDA graphs of choreographed steps, captured and replayed on a device double."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.repository.pages import ROOT


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("model", "is_shared"), [("llama", True), ("llama", False), ("gemma2", True)]
)
def test_random_choreographies(
    model: str, is_shared: bool, tiny_model_path: Callable[[str], Path]
) -> None:
    """Requests come and go, repair and read together: compared with the oracle in that process."""
    pytest.importorskip("triton")
    choices = {"seeds": [*range(4)], "shared_reading": is_shared}
    command = [sys.executable, "-m", "tests.engine.graphs_of_calls"]
    done = subprocess.run(
        [*command, str(tiny_model_path(model)), json.dumps(choices)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=2300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["planned"] >= 20 and report["others"] >= 5, report
    assert report["waits"] == []

# SPDX-License-Identifier: Apache-2.0
"""What a server does at its start when something of it is missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_choreo.testing.server import start_server


@pytest.mark.exhaustive  # a server's start
def test_a_server_without_its_routes_does_not_start(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM goes on without an endpoint plugin that cannot be imported."""
    missing = "vllm_choreo.server.routes"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with (
        pytest.raises(RuntimeError, match=f"import of {missing} halted") as ended,
        start_server(tiny_model_path("llama"), tmp_path, env={"PYTHONPATH": path}),
    ):
        pytest.fail("it serves")
    assert "the server ended at its start" in str(ended.value)

# SPDX-License-Identifier: Apache-2.0
"""Programs of `examples` that ask a server, run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from vllm_choreo.testing.server import KEYS, Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["online", "langgraph_team"])
def test_a_program_over_http_runs(
    name: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = server.base_url + ("/v1" if name == "langgraph_team" else "")
    words = ["--base-url", base, "--api-key", KEYS[0], "--max-tokens", "2"]
    words += ["--model", server.model] if name == "langgraph_team" else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    if name == "online":
        assert printed.count("tokens reused") == 3
    else:
        # Brief, roles, tasks and answers, once each: less than its three calls read together.
        (encoded,) = re.findall(r"(\d+) tokens encoded in all", printed)
        assert 60 < int(encoded) < 200

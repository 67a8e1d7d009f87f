# SPDX-License-Identifier: Apache-2.0
"""The examples of agents run both ways, with the real packages, and encode less choreographed."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.harness.serving import Server

pytestmark = pytest.mark.exhaustive  # programs against a server

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture
def server(whole_server: Server) -> Server:
    """Of a model that can answer."""
    return whole_server


@pytest.mark.parametrize("name", ["supervisor", "group_chat", "retrieval"])
def test_example_runs_both_ways(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "--base-url": f"{server.base_url}/v1",
        "--api-key": server.keys[0],
        "--model": server.model,
        "--documents": "3",
        "--reports": "1",
        "--max-tokens": "4",
    }
    monkeypatch.setattr(sys, "argv", [name, *(word for pair in arguments.items() for word in pair)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    plain, choreographed = re.findall(r"tokens encoded \| ([\d,]+) \| ([\d,]+)", out)[0]
    assert int(choreographed.replace(",", "")) < int(plain.replace(",", ""))
    assert "time to first token" in out

# SPDX-License-Identifier: Apache-2.0
"""The README's example of a client runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_choreo.testing.server import KEYS, Server

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_example_runs(whole_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    _, example = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", whole_server.base_url)
    exec(compile(example.replace('"secret"', repr(KEYS[0])), "README.md", "exec"), {})
    assert "green" in capsys.readouterr().out

# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it stands, and it fits on three screens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs(embedded_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.engine.engines import stop_engine

    example, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the other: tests/server
    scope: dict[str, object] = {"__name__": "__main__"}
    exec(compile(example, "README.md", "exec"), scope)
    stop_engine(scope["llm"])  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "green" in printed
    assert printed.count("reused_tokens") == 2


def test_links_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150

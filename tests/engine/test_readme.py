# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs(embedded_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.engine.conftest import stop_engine

    example, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the other: tests/server
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    stop_engine(scope["llm"])  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "green" in printed
    assert printed.count("reused_tokens") == 2


def test_offline_example_runs(
    embedded_model_path: Path,
) -> None:
    words = ["examples/offline.py", "--model", str(embedded_model_path), "--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.count("tokens reused") == 2


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`vllm-choreo ([\w-]+)", README))))
def test_commands_exist(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_choreo.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" in done.stdout


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE)))
)
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link

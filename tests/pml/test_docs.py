# SPDX-License-Identifier: Apache-2.0
"""docs/pml.md: its examples run as they stand, and its commands exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import stop_engine
from vllm_choreo.cli import main as cli
from vllm_choreo.pml.language import whitespace
from vllm_choreo.pml.server import openai
from vllm_choreo.server.openai.reading import ARGUMENTS

DOCS = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def test_the_examples_run(shallow_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, program, _, _ = EXAMPLES  # the last one needs a server: tests/pml/server/test_prompts.py
    scope: dict[str, Any] = {}
    try:
        exec(compile(first, "docs/pml.md", "exec"), scope)
        exec(compile(program, "docs/pml.md", "exec"), scope)
    finally:
        if "llm" in scope:
            stop_engine(scope["llm"])
    out = capsys.readouterr().out
    assert "argument_tokens=2" in out and "module bergen" in out


def test_the_example_with_branches_runs(tmp_path: Path) -> None:
    path = tmp_path / "branches.py"  # a program's source is read
    path.write_text(EXAMPLES[2], encoding="utf-8")
    assert "trip" in runpy.run_path(str(path))


@pytest.mark.parametrize("line", re.findall(r"^vllm-choreo (pml .*)$", DOCS, re.MULTILINE))
def test_the_commands_parse(line: str) -> None:
    args = cli._parser().parse_args(line.split())
    assert all((Path(__file__).parents[2] / path).exists() for path in args.files)


def test_keys_of_the_openai_routes_are_those_that_there_are() -> None:
    named = set(re.findall(r"`(choreo_\w+)`", DOCS))
    assert named <= {*ARGUMENTS, *(f"choreo_{name}" for name in openai.ARGUMENTS), "choreo_session"}


def test_the_rule_of_white_space_is_told_where_it_is_kept() -> None:
    """The module says the same at greater length."""
    for words in ("one line break", "the indentation that all its lines share is dropped"):
        assert words in DOCS and words in whitespace.__doc__

# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/planner.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_examples_run(shallow_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.engine.engines import start_engine, stop_engine

    llm = start_engine(shallow_model_path, max_model_len=1024, max_num_batched_tokens=1024)
    scope: dict[str, object] = {"llm": llm}
    try:
        for example in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
            exec(compile(example, "docs/planner.md", "exec"), scope)
    finally:
        stop_engine(llm)
    printed = capsys.readouterr().out
    assert "3 queries x 4 operators = 12 instances" in printed
    assert "6 calls in the naive run -> 2 calls" in printed
    assert "measured: " in printed and "1 calls, 0 joined" in printed

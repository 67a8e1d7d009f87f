# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/integrations.md run as they stand, but for the address, key and model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_choreo.testing.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
EXAMPLES = [
    example
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if "InProcessServer" not in example  # tests/engine/test_in_process.py runs it
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["langchain", "openai", "ag2"])
def test_example_runs(example: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in (
        ("http://localhost:8000", server.base_url),
        ('"secret"', repr(server.keys[0])),
        ('"MODEL"', repr(server.model)),
    ):
        assert old in example
        example = example.replace(old, new)
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


def test_commands_name_files_that_exist() -> None:
    named = re.findall(r"^python (\S+)", PAGE.read_text("utf-8"), re.MULTILINE)
    assert named and all((PAGE.parents[1] / path).exists() for path in named)

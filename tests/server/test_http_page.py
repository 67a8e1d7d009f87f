# SPDX-License-Identifier: Apache-2.0
"""docs/http.md: its commands run against the server, and answer what the page says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo.testing.server import KEYS, Server

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "-- end of block --"

needs_programs = pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("jq")), reason="the page needs curl and jq"
)


@pytest.mark.exhaustive
@needs_programs
def test_the_page_is_what_happens(whole_server: Server, tmp_path: Path) -> None:
    """One shell runs all commands, so that variables live on from block to block."""
    examples = read_page()
    local = "BASE=http://localhost:8000 KEY=alpha\n"
    assert examples[0][0].startswith(local)
    examples[0][0] = examples[0][0].replace(local, f"BASE={whole_server.base_url} KEY={KEYS[0]}\n")
    script = "set -euo pipefail\n" + f"\necho; echo '{END}'\n".join(text for text, _ in examples)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    outputs = done.stdout.split(f"{END}\n")
    assert len(outputs) == len(examples)
    for (_, shown), output in zip(examples, outputs, strict=True):
        if shown.startswith("{"):
            assert_shown(values_of(shown), values_of(output), output)
        elif shown:
            assert_shown(shown.strip(), output.strip(), output)
    assert sum(bool(shown) for _, shown in examples) >= 8


def read_page() -> list[list[str]]:
    """The page's commands, each with the output that is shown below it, or ""."""
    examples: list[list[str]] = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "bash":
            examples.append([text, ""])
        elif kind in ("json", "text"):
            examples[-1][1] = text
    return examples


def values_of(text: str) -> list[Any]:
    """The JSON values that stand one after the other."""
    decoder, values = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def assert_shown(shown: Any, given: Any, whole: str) -> None:
    """What the page shows is given: objects may have more fields, … stands for any text."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert key in given, whole
            assert_shown(value, given[key], whole)
    elif isinstance(shown, list):
        assert len(shown) == len(given), whole
        for one, other in zip(shown, given, strict=True):
            assert_shown(one, other, whole)
    elif isinstance(shown, str):
        pattern = ".*".join(re.escape(part) for part in shown.split("…"))
        assert re.fullmatch(pattern, given, re.DOTALL), whole
    else:
        assert shown == given, whole

# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo keep`: texts saved by one engine, read by another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_choreo.cli.main import _parser, main

DOCS = (Path(__file__).parents[2] / "docs" / "keep.md").read_text(encoding="utf-8")


def test_texts_are_saved_shown_and_loaded(
    tiny_model_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, library = str(tiny_model_path("llama")), str(tmp_path / "library")
    files = [tmp_path / f"{name}.txt" for name in "ab"]
    for number, file in enumerate(files):
        file.write_text(" ".join(f"t{i + number}" for i in range(20, 60)))
    given = [str(file) for file in files]
    assert main(["keep", "save", *given, "--to", library, "--model", model]) == 0
    found = re.search(r"2 messages of (\d+) tokens", capsys.readouterr().out)
    assert found is not None and int(found[1]) >= 80
    assert main(["keep", "show", library]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Made by {Path(model).name}, float") and out.count(" MB; ") == 2
    options = ["--model", model]
    assert main(["keep", "load", library, *options, "--ask", "t5 t6"]) == 0
    read = f"{found[1]} tokens can be read at once, 0 are encoded first"
    assert read in capsys.readouterr().out
    damaged = sorted(Path(library).glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["keep", "show", library]) == 1
    assert f"DAMAGED: {damaged.name}" in capsys.readouterr().out
    assert main(["keep", "show", str(tmp_path / "none")]) == 1
    assert "nothing was saved here" in capsys.readouterr().err
    assert main(["keep", "save", str(tmp_path / "none"), "--to", library]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("line", re.findall(r"^vllm-choreo (keep .*)$", DOCS, re.MULTILINE))
def test_the_commands_of_the_documentation_parse(line: str) -> None:
    import shlex

    assert _parser().parse_args(shlex.split(line)).command == "keep"

# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo pml`, and the examples through it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import stop_engine
from tests.grids import sampled
from vllm_choreo.cli import main as cli
from vllm_choreo.cli.engine import start_engine
from vllm_choreo.pml import cli as command
from vllm_choreo.pml.language.markup import parse
from vllm_choreo.pml.language.printer import to_markup

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "pml").glob("*.pml"))
SCHEMA = '<schema name="s">One. <module name="a">Two.</module></schema>'


def written(folder: Path, text: str, name: str = "file.pml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_check_says_what_is_wrong_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path, SCHEMA)
    prompt = written(tmp_path, '<prompt schema="s"><a/>Hi</prompt>', "prompt.pml")
    assert cli.main(["pml", "check", prompt, good]) == 0
    assert capsys.readouterr().out == "1 schema, 1 prompt: all right\n"
    wrong = written(tmp_path, '<schema name="s">\n  <modul name="a"/>\n</schema>', "wrong.pml")
    assert cli.main(["pml", "check", wrong]) == 1
    assert capsys.readouterr().err.startswith(f"{wrong}: line 2, column 3: unknown element")
    unknown = written(tmp_path, '<prompt schema="s">\n <b/>Hi</prompt>', "unknown.pml")
    assert cli.main(["pml", "check", good, unknown]) == 1
    assert ": line 2, column 2: the schema has no such module; it has a" in capsys.readouterr().err
    for bad in (str(tmp_path / "missing.pml"), written(tmp_path, SCHEMA * 2, "two.pml")):
        assert cli.main(["pml", "check", bad]) == 1
        assert capsys.readouterr().err.startswith(bad)
    assert cli.main(["pml", "check", good, good]) == 1
    assert "two schemas of this name" in capsys.readouterr().err
    assert cli.main(["pml", "run", good]) == 1
    assert "no prompt" in capsys.readouterr().err


def test_check_with_a_model_counts_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shallow_model_path: Path
) -> None:
    text = (
        '<pml><schema name="s"><module name="a">I am <param name="x" len="2"/></module></schema>'
        '<prompt schema="s"><a x="one two three four"/>Hi</prompt></pml>'
    )
    path = written(tmp_path, text)
    assert cli.main(["pml", "check", path]) == 0
    assert cli.main(["pml", "check", path, "--model", str(shallow_model_path)]) == 1
    assert "4 tokens, and its parameter takes 2" in capsys.readouterr().err


def test_there_are_three_examples() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "code-generation",
        "personalisation",
        "travel-planner",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reads_as_it_prints(path: Path) -> None:
    for tree in parse(path.read_text()):
        assert parse(to_markup(tree)) == [tree]


@pytest.fixture(scope="module")
def llm(shallow_model_path: Path) -> Iterator[Any]:
    engine = start_engine(str(shallow_model_path), max_model_len=2048)
    yield engine
    stop_engine(engine)


@pytest.mark.parametrize("path", sampled(EXAMPLES[::-1], 1), ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path,
    llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shallow_model_path: Path,
) -> None:
    monkeypatch.setattr(command, "_engine", lambda args: llm)
    assert cli.main(["pml", "show", str(path), "--model", str(shallow_model_path)]) == 0
    assert f"schema {path.stem}" in capsys.readouterr().out
    assert cli.main(["pml", "encode", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d+ tokens encoded in", out) and "encoded\n" in out
    answers = {}
    for mode in ("choreo", "exact"):
        arguments = ["pml", "run", str(path), "--max-tokens", "12", "--mode", mode]
        assert cli.main(arguments) == 0
        answers[mode] = out = capsys.readouterr().out
        assert out.count("--- prompt ") == 2
        counts = re.findall(r"tokens: (\d+) of modules, (\d+) of arguments, (\d+) new", out)
        for modules, arguments_, new in (map(int, found) for found in counts):
            assert modules > 4 * new
            assert (arguments_ > 0) == (path.stem == "travel-planner")
    if path.stem == "code-generation":
        # All five files are a scaffold: the first answer is that of plain text.
        first = [out.split("--- prompt 2")[0].split("    tokens:")[0] for out in answers.values()]
        assert first[0] == first[1]

# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run` from the command line to the page, on one engine with a shallow model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import stop_engine
from tests.transcript.test_page import browser, needs_chromium
from vllm_choreo.cli import main as cli
from vllm_choreo.cli.engine import start_engine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli import run as command
from vllm_choreo.lab.workflows.prisoners_dilemma import plans_of

DOCS = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llm(shallow_model_path: Path) -> Iterator[Any]:
    llm = start_engine(str(shallow_model_path), max_model_len=2048, forces_tokens=True)
    yield llm
    stop_engine(llm)


@pytest.fixture(autouse=True)
def _one_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a test take the module's engine instead of starting one each."""
    monkeypatch.setattr(command, "start_engine", lambda *_, **__: llm)


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """The transcripts that a command leaves behind, by file name."""
    short = () if "--replay" in arguments else ("--max-tokens", "8")
    assert cli.main(["run", *arguments, *short, "--out", str(out)]) == 0
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def test_both_modes_of_a_tree_and_its_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--candidates", "2", "--voters", "2")
    made = run(tmp_path / "a", "tree_of_thoughts", "--mode", "both", "--limit", "1", *small)
    assert list(made) == ["transcript-baseline.json", "transcript-choreo.json"]
    choreo, baseline = made["transcript-choreo.json"], made["transcript-baseline.json"]
    assert [s["author"] for s in choreo["steps"]] == [s["author"] for s in baseline["steps"]]
    for step in choreo["steps"]:
        times = step["metrics"]
        assert 0 < times["waiting"] <= times["ttft"] <= times["latency"]
        assert times["submitted"] + times["latency"] <= choreo["seconds"]
    votes = [s for s in choreo["steps"] if s["stage"] == "votes"]
    assert all(len(v["parents"]) == 4 and v["usage"]["reused_tokens"] > 50 for v in votes)
    rows = capsys.readouterr().out.splitlines()
    assert any(re.match(r"word_problems  choreo    [01] of 1  +8 ", row) for row in rows)
    assert any(re.match(r"word_problems  baseline  [01] of 1  +8 ", row) for row in rows)

    recorded = tmp_path / "a" / "transcript-baseline.json"
    again = run(tmp_path / "b", "tree_of_thoughts", "--replay", str(recorded))
    (replayed,) = again.values()
    assert replayed["mode"] == "choreo" and replayed["task"] == baseline["task"]
    assert [s["token_ids"] for s in replayed["steps"]] == [
        s["token_ids"] for s in baseline["steps"]
    ]


def test_a_file_of_questions_and_a_game(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = run(tmp_path / "a", "multi_qa", "--data", str(data), "--variant", "parallel")
    assert list(asked) == ["transcript-001.json", "transcript-002.json"]
    first, second, answer = asked["transcript-002.json"]["steps"]
    assert answer["parents"] == [[first["id"], None, None], [second["id"], None, None]]
    assert answer["position"] == max(first["num_tokens"], second["num_tokens"])

    game = run(tmp_path / "b", "prisoners_dilemma", "--leak", "none", "--rounds", "1")
    (played,) = game.values()
    assert len(played["answers"]) == 2
    assert [s["stage"] for s in played["steps"]].count("as heard") == 2


def test_the_page_has_functions_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of docs/workflows.md, with its consent and without; recorded functions, too."""
    (line,) = re.findall(r"^.* run code_review .*$", DOCS, re.MULTILINE)
    consent, program, subcommand, *arguments = shlex.split(line)
    assert (program, subcommand) == ("vllm-choreo", "run")
    name, _, value = consent.partition("=")
    monkeypatch.setenv(name, value)
    made = run(tmp_path / "a", *arguments, "--limit", "1")
    for transcript in made.values():
        (problem,) = transcript["task"]["problems"]
        assert problem["kind"] == "code" and len(problem["answers"]) == 2
    assert [s["role"] for s in made["transcript-choreo.json"]["steps"]][-1] == "answer"
    assert re.search(r"^functions +choreo +[01] of 1 ", capsys.readouterr().out, re.MULTILINE)
    recorded = tmp_path / "a" / "transcript-choreo.json"
    run(tmp_path / "b", "code_review", "--replay", str(recorded))
    monkeypatch.delenv(name)
    for given in (arguments, ["code_review", "--replay", str(recorded)]):
        assert cli.main(["run", *given, "--out", str(tmp_path / "c")]) == 1
        assert f"set {name}=1" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_problem_that_does_not_fit_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    questions = ["Who?", "word " * 3000, "Where?"]
    data.write_text(
        "".join(json.dumps({"question": q, "answers": ["Anna"]}) + "\n" for q in questions)
    )
    out = tmp_path / "out"
    arguments = ["direct", "--data", str(data), "--max-tokens", "2", "--out", str(out)]
    assert cli.main(["run", *arguments]) == 1
    assert {path.name for path in out.iterdir()} == {
        *("transcript-001.json", "transcript-003.json", "index.html")
    }
    (line,) = [row for row in capsys.readouterr().err.splitlines() if "vllm-choreo:" in row]
    assert "questions/2, choreo" in line and "max_model_len" in line


@needs_chromium
def test_the_page_of_a_real_run(tmp_path: Path, shallow_model_path: Path) -> None:
    made = run(tmp_path, "parallel_debate", "--mode", "both", "--limit", "1", "--rounds", "2")
    steps = made["transcript-choreo.json"]["steps"]
    reader, text = browser(tmp_path / "index.html")
    assert len(reader.classes("g", "node")) == len(steps) == 8
    assert len(reader.classes("path", "edge")) == sum(len(s["parents"]) for s in steps)
    assert len(reader.classes("button", "row")) == 8 + 6
    assert len(reader.classes("div", "tokenbar")) == 8 + 6
    for kind in ("waiting", "prefill", "decoding"):
        assert any("left" in (a.get("style") or "") for a in reader.classes("i", kind))
    shown = re.sub(r"<script.*?/script>", "", text, flags=re.DOTALL)
    assert shallow_model_path.name in shown and "The engine did not say" not in shown


def test_the_workflow_of_the_documentation(llm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    program, use, pair = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    scope: dict[str, Any] = {"llm": llm}
    exec(compile(program, "docs/workflows.md", "exec"), scope)
    exec(compile(use, "docs/workflows.md", "exec"), scope)
    transcript = scope["transcript"]
    assert [step.author for step in transcript.steps][-1] == "chair"
    assert (tmp_path / "opinion.html").stat().st_size > 20_000
    exec(compile(pair, "docs/workflows.md", "exec"), scope)
    assert plans_of(scope["leaking"]) == plans_of(scope["as_text"])


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ChoreoError, match=r"does not start with .*nowhere"):
        start_engine(str(tmp_path / "nowhere"), max_model_len=512, forces_tokens=False)

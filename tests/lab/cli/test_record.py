# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo record` up to the engine: tasks, parts, going on; on workflows that take notes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notes import Notes, problems_of
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli import record, tasks
from vllm_choreo.lab.cli.options import WORKFLOWS
from vllm_choreo.lab.problems import trivia
from vllm_choreo.lab.record.recording import PARTS, Recording
from vllm_choreo.trained_adapter import ModelIdentity


class _Failing(Notes):
    """Refuses calls that hold certain texts."""

    texts: tuple[str, ...] = ()

    def decode(self, header: Any, **options: Any) -> Any:
        _Engine.decoded += len(header) if isinstance(header, list) else 1
        if any(text in str(header) for text in _Failing.texts):
            raise ChoreoError("does not fit")
        return super().decode(header, **options)


class _Engine:
    """Opens sessions of notes."""

    decoded = 0

    def __init__(self, llm: Any) -> None:
        pass

    def open(self, mode: str) -> Any:
        return contextlib.nullcontext(_Failing(mode=mode))

    @staticmethod
    def facts(modes: Any) -> dict[str, str]:
        return {}


@pytest.fixture(autouse=True)
def _notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "start_engine", lambda *_, **__: None)
    monkeypatch.setattr(tasks, "turns_of_model", lambda *_: ChatTurns())
    monkeypatch.setattr(record, "LocalEngine", _Engine)
    monkeypatch.setattr(_Engine, "decoded", 0)
    monkeypatch.setattr(_Failing, "texts", ())


def run(tmp_path: Path, *arguments: str) -> int:
    given = ("record", *arguments, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "r"))
    return cli.main(given)


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_every_workflow_is_recorded_as_text(workflow: str, tmp_path: Path) -> None:
    assert run(tmp_path, workflow, *problems_of(workflow), "--limit", "10") == 0
    recording = Recording.load(tmp_path / "r")
    assert (recording.mode, recording.base) == ("baseline", ModelIdentity.of(tmp_path / "model"))
    assert [len(recording.parts[part]) for part in PARTS] == [8, 1, 1]
    seeds = set()
    for runs in recording.parts.values():
        for recorded in runs:
            params = recorded.transcript.inputs["sampling_params"]
            assert (params["temperature"], params["logprobs"]) == (1.0, 64)
            seeds.add(params["seed"])
            assert recorded.transcript.decodes()
    assert len(seeds) == 10  # or equal positions of all runs would be drawn by equal chances


def test_documents_are_recorded_in_one_turn_in_any_order(tmp_path: Path) -> None:
    assert run(tmp_path, "document_qa", "--limit", "10", "--pasted", "--shuffled") == 0
    for runs in Recording.load(tmp_path / "r").parts.values():
        for recorded in runs:
            inputs, steps = recorded.transcript.inputs, recorded.transcript.steps
            assert inputs["pasted"] is inputs["shuffled"] is True
            assert len(steps) == 2 and all(d in steps[-1].message.text for d in inputs["documents"])
    assert run(tmp_path, "document_qa", "--limit", "10") == 1  # recorded otherwise


def test_more_of_the_same_is_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "document_qa", "--limit", "10") == 0
    assert capsys.readouterr().out.endswith("train 8, development 1, test 1\n")
    assert run(tmp_path, "document_qa", "--limit", "20") == 0
    assert _Engine.decoded == 20
    assert capsys.readouterr().out.endswith("train 16, development 2, test 2\n")
    assert run(tmp_path, "document_qa", "--limit", "20", "--set", "key_values") == 1
    assert "recorded otherwise" in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [problem.question for problem in trivia(9, 0)]
    monkeypatch.setattr(_Failing, "texts", tuple(questions[2::3]))
    assert run(tmp_path, "direct", "--limit", "9") == 1
    printed = capsys.readouterr().out
    assert printed.count("does not fit") == 3 and "not recorded: trivia/0/2" in printed
    assert sum(map(len, Recording.load(tmp_path / "r").parts.values())) == 6
    monkeypatch.setattr(_Failing, "texts", ())
    assert run(tmp_path, "direct", "--limit", "9") == 0  # the rest, once more
    assert sum(map(len, Recording.load(tmp_path / "r").parts.values())) == 9


def test_the_same_problem_twice_is_in_one_part(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"Who {i % 4}?", "answers": ["Anna"]} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--data", str(data), "--likeliest", "0", "--shares", "2", "1", "1")
    assert run(tmp_path, "direct", *given) == 0
    recording = Recording.load(tmp_path / "r")
    asked = {
        part: {recorded.transcript.inputs["question"] for recorded in runs}
        for part, runs in recording.parts.items()
    }
    assert [len(asked[part]) for part in PARTS] == [2, 1, 1]
    assert sum(map(len, recording.parts.values())) == 40


@pytest.mark.parametrize(
    "arguments",
    [
        ("direct", "--mode", "choreo"),
        ("direct", "--server", "http://localhost"),
        ("direct", "--likeliest", "-1"),
        ("document_qa", "--set", "novels"),
    ],
)
def test_what_the_arguments_cannot_be(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, *arguments)
    assert ended.value.code == 2

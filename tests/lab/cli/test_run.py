# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run` up to the engine: arguments, tasks, files, the table, and Ctrl-C."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.chat.chat_templates import tokenizer_of
from tests.lab.notes import Notes, problems_of
from tests.transcript.transcripts import debate
from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.cli import main as cli
from vllm_choreo.cli.chat_turns import turns_of_model
from vllm_choreo.cli.engine import LocalEngine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli import run as command
from vllm_choreo.lab.cli.options import OPTIONS, WORKFLOWS
from vllm_choreo.lab.cli.report import Result, question_of, save_transcript, table
from vllm_choreo.lab.cli.run import modes_of, run_tasks
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.cli.tasks import tasks_of
from vllm_choreo.lab.problems import Problem
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.testing.models.embedded import embedded_model
from vllm_choreo.transcript.transcript import Transcript


def parsed(*arguments: str) -> Namespace:
    return cli._parser().parse_args(["run", *arguments])


def lines(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_options_are_arguments_of_the_workflow_and_name_its_defaults(workflow: str) -> None:
    given = inspect.signature(program_of(workflow)).parameters
    for name, settings in OPTIONS.get(workflow, {}).items():
        default = given[name].default
        shown = " ".join(default) if isinstance(default, tuple) else str(default)
        assert settings["help"].endswith(f"(default: {shown})")


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_every_workflow_runs_on_problems_of_its_own(workflow: str) -> None:
    given = workflow, *problems_of(workflow), "--limit", "2", "--seed", "7"
    tasks = tasks_of(parsed(*given))
    assert len(tasks) == 2 and tasks[0].inputs != tasks[1].inputs
    for task in tasks:
        transcript = program_of(workflow)(Notes(), **task.inputs)
        assert transcript.decodes() and transcript.answers
        assert all(step.message.role for step in transcript.steps), "policies go by roles"
        assert question_of(task, transcript.inputs)
        assert len(task.expected()) == len(task.problems)
        assert task.is_right(transcript.answers) in ((False,) if task.problems else (None,))
    assert [task.inputs for task in tasks_of(parsed(*given))] == [task.inputs for task in tasks]


def test_options_reach_the_workflow() -> None:
    given = ("--candidates", "2", "--voters", "3", "--max-tokens", "9", "--temperature", "0")
    (task,) = tasks_of(parsed("tree_of_thoughts", "--limit", "1", *given))
    assert (task.inputs["candidates"], task.inputs["voters"]) == (2, 3)
    assert task.inputs["sampling_params"].max_tokens == task.inputs["vote_params"].max_tokens == 9
    assert "restate" not in task.inputs
    (task,) = tasks_of(parsed("parallel_debate", "--limit", "1", "--restate"))
    assert task.inputs["restate"] is True
    (game,) = tasks_of(parsed("prisoners_dilemma", "--strategies", "none", "always defect"))
    assert game.inputs["strategies"] == ["none", "always defect"]
    played = program_of("prisoners_dilemma")(Notes(), **game.inputs)
    assert "strategies: none, always defect" in question_of(game, played.inputs)
    assert game.expected() == []
    inputs = {**played.inputs, "turns": ChatTurns().to_json(), "plans": [[1], [2]]}
    assert question_of(game, inputs) == question_of(game, played.inputs)


@pytest.mark.parametrize(
    "arguments",
    [
        ("no_such_workflow",),
        ("direct", "--limit", "0"),
        ("direct", "--limit", "many"),
        ("direct", "--temperature", "hot"),
        ("direct", "--top-p", "0"),
        ("multi_qa", "--layout", "diagonal"),
        ("prisoners_dilemma", "--first", "Carol"),
        ("direct", "--seed", "-1"),
        ("direct", "--rounds", "2"),
        ("direct", "--mode", "fast"),
        ("multi_qa", "--variant", "diagonal"),
        ("prisoners_dilemma", "--data", "file.jsonl"),
        ("prisoners_dilemma", "--leak", "all"),
    ],
)
def test_what_the_arguments_cannot_be(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert ended.value.code == 2
    assert "Traceback" not in (error := capsys.readouterr().err)
    assert arguments[-1] in error.splitlines()[-1]


GOOD = {"question": "Who?", "answers": ["Anna"]}


@pytest.mark.parametrize(
    ("workflow", "rows", "said"),
    [
        ("direct", None, "No such file"),
        ("direct", [GOOD, "no JSON\n"], "line 2"),
        ("direct", [{"question": "Who?"}], "line 1"),
        ("direct", [], "no rows"),
        ("multi_qa", [GOOD, GOOD, GOOD], "one is left over"),
        ("branch_solve_merge", [GOOD], "concepts"),
    ],
)
def test_files_that_do_not_suit(
    workflow: str,
    rows: list[Any] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "start_engine", None)  # nothing may get so far
    data = tmp_path / "data.jsonl"
    if rows is not None:
        lines(data, *rows)
    assert cli.main(["run", workflow, "--data", str(data), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-choreo: ") and said in line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "file")
    assert cli.main(["run", "direct", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot make the folder" in capsys.readouterr().err


# -- problems ------------------------------------------------------------------------------------


def test_documents_stand_before_the_question(tmp_path: Path) -> None:
    row = {
        **GOOD,
        "ctxs": [{"title": "Bicycles", "text": "Anna owns one."}, {"text": "Bob: none."}],
    }
    (task,) = tasks_of(parsed("direct", "--data", lines(tmp_path / "nq.jsonl", row)))
    assert task.inputs["question"] == "Bicycles\nAnna owns one.\n\nBob: none.\n\nWho?"
    assert task.source == "nq.jsonl"


def test_a_limit_counts_runs(tmp_path: Path) -> None:
    data = lines(tmp_path / "data.jsonl", *[{**GOOD, "question": f"Who {i}?"} for i in range(6)])
    assert len(tasks_of(parsed("direct", "--data", data))) == 6
    tasks = tasks_of(parsed("multi_qa", "--data", data, "--limit", "2"))
    assert [task.inputs["questions"] for task in tasks] == [
        ["Who 0?", "Who 1?"],
        ["Who 2?", "Who 3?"],
    ]


def number(answer: str) -> Problem:
    return Problem(f"n/{answer}", "How many?", (answer,), "number")


def test_most_answers_must_be_right_on_every_problem() -> None:
    one = Task("n", "n", {}, (number("4"),))
    assert one.is_right(["4", "#### 4", "5"]) is True
    assert one.is_right(["4", "5"]) is False
    anna = Problem("a", "Who?", ("Anna", "Ann"), "trivia")
    both = Task("n", "n", {}, (anna, Problem("b", "Where?", ("Rome",), "trivia")))
    assert both.is_right(["Anna lives in Rome."]) is True
    assert both.coverage(["Anna lives in Paris."]) == 0.5
    assert one.coverage(["4", "5"]) == 0
    assert both.is_right(["Anna"]) is False
    assert both.expected() == ["Anna / Ann", "Rome"]


# -- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma", "qwen3"])
def test_a_workflow_writes_the_turns_of_its_model(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(tmp_path)
    (task,) = tasks_of(parsed("direct", "--limit", "1", "--model", str(tmp_path)))
    turns = turns_of_tokenizer(tokenizer)
    assert task.inputs.get("turns") == (None if family == "qwen3" else turns.to_json())
    log = program_of("direct")(Notes(), **task.inputs)
    text = "".join(step.message.text for step in log.steps)
    question = [{"role": "user", "content": task.inputs["question"]}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    # A system turn that a template adds of its own accord is not the question's.
    assert text == turns.start + asked[asked.index(turns.user_opening) :] + "…"
    assert asked.startswith(turns.start)
    path = tmp_path / "transcript.json"
    save_transcript(Result(task, log, False), path)
    (again,) = tasks_of(parsed("direct", "--replay", str(path)))
    assert again.inputs == {**task.inputs, "opening": ""}


def test_a_model_without_a_template_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("gemma"))
    template = tmp_path / "turns.jinja"
    template.write_text(tokenizer.chat_template)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    given = ("direct", "--model", str(tmp_path / "base"))
    with pytest.raises(ChoreoError, match=r"no chat template.*--chat-template FILE"):
        tasks_of(parsed(*given))
    (task, *_) = tasks_of(parsed(*given, "--chat-template", str(template)))
    assert task.inputs["turns"]["start"] == "<bos>"
    with pytest.raises(ChoreoError, match=r"cannot read .*none\.jinja"):
        tasks_of(parsed(*given, "--chat-template", str(tmp_path / "none.jinja")))
    template.write_bytes(b"\xff")
    with pytest.raises(ChoreoError, match=r"cannot read .*turns\.jinja"):
        tasks_of(parsed(*given, "--chat-template", str(template)))
    with pytest.raises(ChoreoError, match=r"tokenizer of .* cannot be read"):
        tasks_of(parsed("direct", "--model", str(tmp_path / "nothing")))


def test_the_small_model_writes_chatml() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_model()))
    assert turns_of_tokenizer(tokenizer) == ChatTurns() == turns_of_model(None)


def test_games_take_turns_at_who_speaks_first() -> None:
    tasks = tasks_of(parsed("prisoners_dilemma", "--limit", "3"))
    assert [task.inputs["first"] for task in tasks] == ["Alice", "Bob", "Alice"]
    bob = tasks_of(parsed("prisoners_dilemma", "--limit", "2", "--first", "Bob", "--predict"))
    assert [(task.inputs["first"], task.inputs["predict"]) for task in bob] == [("Bob", True)] * 2


def test_a_verdict_that_is_the_answer_has_its_length() -> None:
    paper = ("iterative_debate", "--limit", "1", "--layout", "paper")
    (task,) = tasks_of(parsed(*paper))
    assert task.inputs["sampling_params"].max_tokens == 128 and "verdict_params" not in task.inputs
    (task,) = tasks_of(parsed(*paper, "--short-tokens", "9"))
    assert task.inputs["verdict_params"].max_tokens == 9
    (task,) = tasks_of(parsed(*paper[:3]))
    assert task.inputs["verdict_params"].max_tokens == 16


def test_top_p_reaches_the_calls() -> None:
    (task,) = tasks_of(parsed("tree_of_thoughts", "--limit", "1", "--top-p", "0.95"))
    assert task.inputs["sampling_params"].top_p == task.inputs["vote_params"].top_p == 0.95
    (task,) = tasks_of(parsed("tree_of_thoughts", "--limit", "1"))
    assert task.inputs["sampling_params"].top_p == 1


# -- replay --------------------------------------------------------------------------------------


def test_a_saved_transcript_is_a_task_again(tmp_path: Path) -> None:
    (task,) = tasks_of(parsed("tree_of_thoughts", "--limit", "1", "--voters", "2"))
    transcript = program_of("tree_of_thoughts")(Notes(), **task.inputs)
    path = tmp_path / "transcript.json"
    save_transcript(Result(task, transcript, False), path)
    assert [file.name for file in tmp_path.iterdir()] == ["transcript.json"]
    (again,) = tasks_of(parsed("tree_of_thoughts", "--replay", str(path)))
    assert (again.id, again.source, again.problems) == (task.id, task.source, task.problems)
    assert again.inputs == {**task.inputs, "candidates": 8, "restate": False}  # the defaults taken
    assert again.recorded is not None
    with Replay(Notes(mode="baseline"), again.recorded) as replay:
        repeated = program_of("tree_of_thoughts")(replay, **again.inputs)
    assert (repeated.mode, repeated.answers) == ("baseline", transcript.answers)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (json.dumps(debate()), ("direct",), "parallel_debate, not of direct"),
        (json.dumps(debate()), ("parallel_debate", "--rounds", "2"), "leave out --rounds"),
        (json.dumps(debate()), ("parallel_debate", "--max-tokens", "2"), "leave out --max-tokens"),
        (json.dumps(debate()), ("parallel_debate", "--top-p", "0.5"), "leave out --top-p"),
        (json.dumps({**debate(), "format": 99}), ("parallel_debate",), "format 1"),
        (json.dumps({**debate(), "task": {}}), ("parallel_debate",), "no transcript"),
        (json.dumps({**debate(), "inputs": {"query": "?"}}), ("parallel_debate",), "other inputs"),
        ("[1, 2]", ("direct",), "no transcript"),
        ('{"format": 1}', ("direct",), "no transcript"),
        ("", ("direct",), "no transcript"),
    ],
)
def test_transcripts_that_cannot_be_replayed(
    content: str,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    assert cli.main(["run", *arguments, "--replay", str(path), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


class _Engine:
    """What `vllm-choreo run` runs on, for a workflow that only takes notes."""

    def open(self, mode: str) -> Any:
        return contextlib.nullcontext(Notes(mode=mode))

    def facts(self, modes: Sequence[str]) -> dict[str, str]:
        return {"model": "notes"}

    sampling = staticmethod(LocalEngine.sampling)


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values in JSON data, lists and objects included; of long lists the first two."""
    if path:
        yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data[:2]):
            yield from _places(value, (*path, key))


def _replaced(data: Any, path: Sequence[Any], value: Any) -> Any:
    if not path:
        return value
    copied = data.copy()
    copied[path[0]] = _replaced(data[path[0]], path[1:], value)
    return copied


@pytest.mark.exhaustive
@pytest.mark.parametrize("workflow", ["tree_of_thoughts", "prisoners_dilemma", "multi_qa"])
def test_no_malformed_transcript_ends_in_a_traceback(
    workflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_engine", lambda *_: _Engine())
    small = {"tree_of_thoughts": ("--candidates", "2", "--voters", "2")}.get(workflow, ())
    (task,) = tasks_of(parsed(workflow, "--limit", "1", *small))
    path = tmp_path / "t.json"
    save_transcript(Result(task, program_of(workflow)(Notes(), **task.inputs), False), path)
    whole = json.loads(path.read_text())
    whole["steps"] = [*whole["steps"][:2], whole["steps"][-1]]
    replay = ["run", workflow, "--replay", str(path), "--out", str(tmp_path / "out")]
    for place in _places(whole):
        for value in (None, -1, True, "x", [], {"a": 1}):
            path.write_text(json.dumps(_replaced(whole, place, value)))
            assert cli.main(replay) in (0, 1), (place, value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("steps", 5, "text"), None, "steps[5].text must be a text, not None"),
        (("steps", 0, "token_ids", 1), "7", "steps[0].token_ids[1] must be an integer, not '7'"),
        (("steps", 0, "token_ids", 1), -7, "steps[0].token_ids must hold token ids"),
        (("steps", 6, "parents", 0), ["s/0"], "steps[6].parents[0] must be [id, start, stop]"),
        (("steps", 6, "metrics", "ttft"), "fast", "steps[6].metrics.ttft must be a number"),
        (("steps", 6, "usage"), 5, "steps[6].usage must be an object"),
        (("answers",), "yes", "answers must be a list of which each is a text, not 'yes'"),
        (("inputs", "question"), 5, "inputs.question must be a text, not 5"),
        (("inputs", "sampling_params"), {"max_tokens": "x"}, "inputs.sampling_params are no"),
    ],
)
def test_a_malformed_transcript_is_refused_with_the_place(
    place: tuple[Any, ...],
    value: Any,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = debate()
    data["inputs"]["sampling_params"] = None
    path = tmp_path / "t.json"
    path.write_text(json.dumps(_replaced(data, place, value)))
    out = str(tmp_path / "out")
    assert cli.main(["run", "parallel_debate", "--replay", str(path), "--out", out]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-choreo: {path} is no transcript") and said in line


# -- what is left behind -------------------------------------------------------------------------


def result(mode: str, correct: bool | None, source: str = "sums") -> Result:
    transcript = Transcript.from_json(debate(mode, rounds=1))
    return Result(Task("n", source, {}, ()), transcript, correct)


def test_the_table_sums_up_each_set_of_problems_and_mode() -> None:
    results = [result("choreo", True), result("choreo", False), result("baseline", True)]
    results.append(result("choreo", None, "games"))
    head, _, *rows = table(results).splitlines()
    assert re.split(r"\s{2,}", head) == [
        *("problems", "mode", "right", "calls", "reused", "encoded", "TTFT", "seconds")
    ]
    one = debate(rounds=1)["steps"]
    reused = sum(step["usage"]["reused_tokens"] for step in one)
    encoded = sum(step["usage"]["encoded_tokens"] for step in one)
    seconds = debate(rounds=1)["seconds"]
    assert re.split(r"\s{2,}", rows[0]) == [
        *("sums", "choreo", "1 of 2", "16", f"{2 * reused:,}", f"{2 * encoded:,}"),
        *("50 ms", f"{2 * seconds:.1f}"),
    ]
    assert [re.split(r"\s{2,}", row)[:3] for row in rows[1:]] == [
        ["sums", "baseline", "1 of 1"],
        ["games", "choreo", "- of 1"],
    ]


def test_ctrl_c_leaves_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of(parsed("parallel_debate", "--limit", "3"))
    runs = iter(
        [Transcript.from_json(debate(mode)) for mode in ("choreo", "baseline", "choreo")] + [None]
    )

    def run(*_: Any) -> Transcript:
        transcript = next(runs)
        if transcript is None:
            raise KeyboardInterrupt
        return transcript

    monkeypatch.setattr(command, "warm_up", lambda engine, modes: None)
    monkeypatch.setattr(command, "_run", run)
    engine: Any = SimpleNamespace(facts=lambda modes: {"model": "small"})
    with pytest.raises(KeyboardInterrupt):
        run_tasks(engine, tasks, "parallel_debate", modes_of("both"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("transcript-001-choreo.json", "transcript-001-baseline.json"),
        *("transcript-002-choreo.json", "index.html"),
    }
    for path in tmp_path.glob("*.json"):
        assert len(Transcript.load(path).steps) == 14
    page = (tmp_path / "index.html").read_text()
    assert all(task.problems[0].question in page for task in tasks[:2])
    assert tasks[2].problems[0].question not in page

# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo tables`: what is counted, runs that go on where they stopped, and the page."""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat.chat_templates import tokenizer_of
from tests.engine.adapters import Adapter
from tests.lab.notes import REQUESTS
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.problems import Problem, functions, load_jsonl
from vllm_choreo.lab.problems.programs import CONSENT
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT, Judged
from vllm_choreo.lab.study.tables import arms as table_arms
from vllm_choreo.lab.study.tables import command, running
from vllm_choreo.lab.study.tables.definitions import TABLES, measured
from vllm_choreo.lab.study.tables.log import RunLog
from vllm_choreo.lab.workflows.prisoners_dilemma import STRATEGIES

FUNCTIONS = Path(__file__).with_name("functions.jsonl")
DOCS = (Path(__file__).parents[3] / "docs" / "answers.md").read_text(encoding="utf-8")


def _judged(*answers: str, is_right: bool | None = None) -> Judged:
    return Judged(answers, is_right, num_encoded=7, ttft=0.5)


# -- what is counted -----------------------------------------------------------------------------


def test_each_question_of_two_is_counted() -> None:
    problems = tuple(
        Problem(str(i), text, (answer,), "trivia")
        for i, (text, answer) in enumerate((("Who?", "Anna"), ("Where?", "Rome")))
    )
    task, measures = Task("one", "file", {}, problems), TABLES["multi_qa"].measures
    for answer, expected in (
        ("1. Anna\n2. Rome", [True, True, True]),
        ("1. Anna\n2. Paris", [False, True, False]),
        ("2. Rome", [False, False, True]),
    ):
        found = [measured(one, task, _judged(answer)) for one in measures.values()]
        assert [one.is_right for one in found] == expected
        assert all(one.coverage is None and one.num_encoded == 7 for one in found)


def test_concepts_of_the_merged_story_are_counted() -> None:
    words = ("tree", "dog", "house", "boat", "river")
    problem = Problem("0", "Write.", words, "concepts")
    task, measures = Task("one", "file", {}, (problem,)), TABLES["branch_solve_merge"].measures
    found = [measured(one, task, _judged("Two dogs and a boat.")) for one in measures.values()]
    assert [one.coverage for one in found] == pytest.approx([2 / 5])


def test_cooperation_is_counted_by_what_alice_is_told() -> None:
    table = TABLES["prisoners_dilemma"]
    groups = table.grouped([Task("game 1", "game", {"strategies": ["none", "none"]}, ())])
    assert [tasks[0].inputs["strategies"] for tasks in groups.values()] == [
        [name, "none"] for name in STRATEGIES
    ]
    ids = {tasks[0].id for tasks in groups.values()}
    assert len(ids) == 3 and "Alice: always defect, game 1" in ids
    task = groups["Alice: none"][0]
    for answers, expected in (
        (("defect", "cooperate"), [True, False]),
        (("cooperate", "undecided"), [False, True]),
    ):
        found = [measured(one, task, _judged(*answers)) for one in table.measures.values()]
        assert [one.is_right for one in found] == expected


def test_functions_that_pass_their_test_are_counted() -> None:
    (problem,) = functions(1)
    head, test = problem.answers
    task, (measure,) = Task("0", "file", {}, (problem,)), TABLES["code_review"].measures.values()
    expected = [ast.literal_eval(line.partition(" == ")[2]) for line in test.splitlines()]
    right = f"{head}    return iter_answers.pop(0)\n\niter_answers = {expected!r}\n```\nSo it is."
    for answer, is_right in ((right, True), (head, False), ("I do not know.", False)):
        assert measured(measure, task, _judged(answer)).is_right is is_right


def test_requests_that_are_met_are_counted() -> None:
    (problem,) = load_jsonl(REQUESTS, limit=1)
    task = Task("0", "file", {}, (problem,))
    first, second, *_ = json.loads(problem.answers[1])
    table = TABLES["function_calls"]
    for made, share in (([[first]], 0.25), ([[first], [second]], 0.5), ([], 0.0)):
        judged = _judged(json.dumps(made))
        all_met, met = (measured(one, task, judged) for one in table.measures.values())
        assert (all_met.is_right, met.coverage) == (False, share)


def test_parents_are_seen_where_they_were_encoded() -> None:
    calls: list[dict[str, Any]] = []
    c = SimpleNamespace(mode="choreo", prefill=calls.extend, decode=calls.extend)
    first, second = (SimpleNamespace(position=p, num_tokens=n) for p, n in ((3, 10), (0, 5)))
    facade = table_arms.NotRepositioned(c)  # type: ignore[arg-type]
    facade._decode(
        [
            {"header": "a"},
            {"header": "b", "parents": [first, second]},
            {"header": "c", "parents": [second], "offsets": [7]},
        ]
    )
    assert calls == [
        {"header": "a"},
        {"header": "b", "parents": [first, second], "offsets": [3, 0], "new_offset": 13},
        {"header": "c", "parents": [second], "offsets": [7]},
    ]


# -- the log -------------------------------------------------------------------------------------


def test_a_log_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path, {"seed": 0})
    log.add("a", TEXT, _judged("one", "two", is_right=True))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"task": "b", "arm": "te')
    log = RunLog(tmp_path, {"seed": 0})
    assert ("a", TEXT) in log and ("b", TEXT) not in log
    assert log["a", TEXT] == _judged("one", "two", is_right=True)
    log.add("b", TEXT, _judged("three"))
    assert RunLog(tmp_path, {"seed": 0})["b", TEXT] == _judged("three")


def test_runs_with_other_settings_are_not_mixed(tmp_path: Path) -> None:
    RunLog(tmp_path, {"seed": 0, "model": "a"})
    with pytest.raises(ChoreoError, match="has runs with model 'a'"):
        RunLog(tmp_path, {"seed": 0, "model": "b"})


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture
def tables(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., int]:
    """`tables(*arguments)` on the module's engine, in a folder with `trivia.jsonl`: two pairs."""
    model = tiny_model_path("llama")
    llm = engine_slot(model, enable_lora=True, max_lora_rank=8)
    monkeypatch.setattr(command, "start_engine", lambda *_, **__: llm)
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"Who is {name}?", "answers": [name]} for name in "abcd"]
    template = tmp_path / "turns.jinja"  # the tiny model has none
    template.write_text(str(tokenizer_of("smollm2").chat_template))
    (tmp_path / "trivia.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        main = command.command(parser)
        given = [str(model) if word == "MODEL" else word for word in arguments]
        return main(
            parser.parse_args([*given, "--max-tokens", "4", "--chat-template", str(template)])
        )

    return run


def test_a_table_goes_on_and_is_drawn(
    tables: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)
    name, subcommand, *given = shlex.split(block)
    assert (name, subcommand) == ("vllm-choreo", "tables")
    run_together, num_run = running.run_together, []

    def counted(c: Any, programs: Any) -> Any:
        if len(num_run) == 4:
            raise KeyboardInterrupt
        num_run.append(len(programs))
        return run_together(c, programs)

    monkeypatch.setattr(running, "run_together", counted)
    with pytest.raises(KeyboardInterrupt):
        tables(*given)
    runs = tmp_path / "tables" / "multi_qa" / "runs.jsonl"
    assert len(runs.read_text().splitlines()) == 4  # all arms of one pair, the text of another
    assert "both" in capsys.readouterr().out
    monkeypatch.setattr(running, "run_together", run_together)
    before = runs.read_text()
    assert tables(*given) == 0
    assert runs.read_text().startswith(before)
    assert len(runs.read_text().splitlines()) == 6  # each once
    with (runs.parent / "evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [TEXT, CHOREOGRAPHED, table_arms.NOT_REPOSITIONED]
    measures = ["both", "question 1", "question 2"]
    assert [(row["set"], row["arm"]) for row in rows] == [
        (measure, arm) for measure in measures for arm in names
    ]
    assert all(row["judged"] == "2" and row["p_value"] for row in rows)
    assert (runs.parent / "index.html").read_text().count("<section>") >= 3
    assert all(len(line) <= 100 for line in capsys.readouterr().out.splitlines())
    monkeypatch.setattr(command, "start_engine", None)  # nothing is started
    assert tables(*given, "--draw") == 0


def test_an_arm_that_is_added_runs_alone(
    tables: Callable[..., int], adapter: Adapter, tmp_path: Path
) -> None:
    given = ["multi_qa", "--model", "MODEL", "--data", "trivia.jsonl", "--limit", "1"]
    assert tables(*given) == 0
    runs = tmp_path / "tables" / "multi_qa" / "runs.jsonl"
    before = runs.read_text()
    folder = adapter.placed("prefill")
    assert tables(*given, "--adapter", str(folder)) == 0
    assert runs.read_text().startswith(before)
    (added,) = map(json.loads, runs.read_text().removeprefix(before).splitlines())
    assert added["arm"].startswith(f"+ {folder.name}, ")  # and its weights
    assert tables("prisoners_dilemma", "--model", "MODEL", "--limit", "1") == 0
    games = (tmp_path / "tables" / "prisoners_dilemma" / "runs.jsonl").read_text().splitlines()
    assert len(games) == len(STRATEGIES) * 4  # text, choreographed, in place, nothing leaks


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["multi_qa"], "name it with --data"),
        (["prisoners_dilemma", "--data", "x"], "leave out --data"),
        (["parallel_debate", "--data", "/nowhere.jsonl"], "cannot read"),
        (["code_review", "--data", str(FUNCTIONS)], f"set {CONSENT}=1"),
        (["function_calls", "--data", str(FUNCTIONS)], "function_calls needs rows with question"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONSENT)
    parser = argparse.ArgumentParser()
    main = command.command(parser)
    with pytest.raises(ChoreoError, match=advice):
        main(parser.parse_args([*arguments, "--model", "m", "--out", str(tmp_path)]))
    assert not list(tmp_path.iterdir())

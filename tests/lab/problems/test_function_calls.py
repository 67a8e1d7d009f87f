# SPDX-License-Identifier: Apache-2.0
"""Calls of functions: found in what a model says, run in BFCL's simulations, judged by BFCL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bfcl_eval
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.problems import DataError, Problem, load_jsonl
from vllm_choreo.lab.problems.function_calls import SimulatedFunctions, calls_in, share_met
from vllm_choreo.lab.problems.grading import is_correct

DATA = Path(bfcl_eval.__path__[0], "data")
BASE = DATA / "BFCL_v4_multi_turn_base.json"
MATH = {"id": "0", "involved_classes": ["MathAPI"], "initial_config": {}}

literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)
)
names = st.sampled_from(["cd", "mkdir", "post_tweet"])
arguments = st.lists(literals, max_size=2), st.dictionaries(names, literals, max_size=2)
prose = st.text(st.characters(exclude_characters="[]"))


@given(st.lists(st.tuples(names, *arguments), max_size=3), prose, prose)
def test_a_list_of_calls_is_found_in_prose(
    given_calls: list[tuple[str, list[Any], dict[str, Any]]], before: str, behind: str
) -> None:
    calls = [
        f"{name}({', '.join([*map(repr, plain), *(f'{k}={v!r}' for k, v in named.items())])})"
        for name, plain, named in given_calls
    ]
    assert calls_in(f"{before}[{', '.join(calls)}]{behind}") == calls
    assert calls_in(before) == []


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("```python\n[cd(folder='a')]\n```\nThen [ls()].", ["cd(folder='a')"]),
        ("The list [1] is none, [ls()] is.", ["ls()"]),
        ("[cd(folder='a'), [ls()]]", ["ls()"]),
        ("[cd(folder=name)]", []),
        ("[cd(**{'folder': 'a'})]", []),
        ("[files.cd(folder='a')]", []),
        ("[cd(folder=open('x'))]", []),
        ("ls()", []),
        ("[ls()", []),
        ("[" * 300, []),
    ],
)
def test_only_literals_are_arguments(text: str, calls: list[str]) -> None:
    assert calls_in(text) == calls


def test_functions_begin_where_the_scenario_says_and_keep_what_was_done() -> None:
    (problem, *_) = load_jsonl(BASE, limit=1)
    scenario = json.loads(problem.answers[0])
    functions, others = SimulatedFunctions(scenario), SimulatedFunctions(scenario)
    assert "cd(folder: string): Change the current working directory" in functions.text
    assert "\ncp(" not in functions.text, "the row leaves it out"
    assert json.loads(functions.run("pwd()")) == {"current_working_directory": "/workspace"}
    functions.run("cd(folder='document')")
    assert json.loads(functions.run("pwd()"))["current_working_directory"].endswith("document")
    assert json.loads(others.run("pwd()")) == {"current_working_directory": "/workspace"}
    for wrong in ("cd('nowhere')", "cd()", "cd(1, 2, 3)"):
        assert "rror" in functions.run(wrong)
    for name in ("cp", "_load_scenario", "print", "open"):
        assert f"{name}('a', 'w')" not in functions
        assert functions.run(f"{name}('a', 'w')") == f"Error: no function {name}"


@pytest.mark.parametrize("category", ["base", "miss_param", "long_context"])
def test_what_is_to_be_called_meets_all_requests_and_less_does_not(category: str) -> None:
    """BFCL's own answers are the oracle."""
    problems = load_jsonl(DATA / f"BFCL_v4_multi_turn_{category}.json")
    assert len(problems) == 200 and {problem.kind for problem in problems} == {"calls"}
    for problem in problems[::8]:
        wanted = json.loads(problem.answers[1])
        made = [[calls] for calls in wanted]
        assert is_correct("calls", json.dumps(made), problem.answers)
        assert is_correct("calls", json.dumps(made), problem.answers), "twice the same"
        (last,) = [i for i, calls in enumerate(wanted) if calls][-1:]
        less = [calls if i < last else [] for i, calls in enumerate(made)]
        assert _share(less, problem) == pytest.approx(last / len(wanted))
        assert not is_correct("calls", json.dumps(less), problem.answers)
        assert not is_correct("calls", "I cannot do that.", problem.answers)


def test_what_a_model_says_is_judged_as_calls_of_the_first_request() -> None:
    (problem,) = load_jsonl(BASE, limit=1)
    first, *_ = json.loads(problem.answers[1])
    said = f"I call [{', '.join(first)}]"
    assert share_met(said, *problem.answers) == pytest.approx(1 / 4)


def test_no_other_function_is_called_by_the_judge(tmp_path: Path) -> None:
    (problem,) = load_jsonl(BASE, limit=1)
    trace = tmp_path / "trace"
    wanted = json.loads(problem.answers[1])
    made = [[[f"open({str(trace)!r}, 'w')", *calls]] for calls in wanted]
    assert _share(made, problem) == 1.0
    inner = [[[f"cd(folder=open({str(trace)!r}, 'w'))"]]]
    assert _share(inner, problem) == 0.0
    assert not trace.exists()
    for said in ("[[1]]", '[["ls()"]]', "{}", "1", "[[[1]]]"):
        assert share_met(said, *problem.answers) == 0.0


def test_without_the_package_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ChoreoError, match="pip install --no-deps bfcl-eval"):
        SimulatedFunctions(MATH)


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(ChoreoError, match="no functions of this name; it has GorillaFileSystem"):
        SimulatedFunctions({**MATH, "involved_classes": ["Nothing"]})


def test_a_state_in_which_nothing_can_begin_is_named() -> None:
    files = {"involved_classes": ["GorillaFileSystem"]}
    for state in ({"root": []}, {"root": {"home": 1}}, 7):
        row = {**MATH, **files, "initial_config": {"GorillaFileSystem": state}}
        with pytest.raises(ChoreoError, match="GorillaFileSystem can begin with") as caught:
            SimulatedFunctions(row)
        assert caught.value.parameter == "initial_config.GorillaFileSystem"


ROW: dict[str, Any] = {
    **MATH,
    "question": [[{"role": "user", "content": "Add 1 and 2."}]],
    "ground_truth": [["add(a=1, b=2)"]],
}


def test_a_row_is_read_with_its_own_answers_or_those_beside_it(tmp_path: Path) -> None:
    (problem,) = _load(tmp_path, ROW)
    assert (problem.id, problem.question) == ("0", "Add 1 and 2.")
    assert _share([[["add(a=1, b=2)"]]], problem) == 1.0
    assert _share([[["add(a=1, b=3)"]]], problem) == 0.0
    bare = {name: value for name, value in ROW.items() if name != "ground_truth"}
    with pytest.raises(DataError, match=r"field 'ground_truth': missing, and .*possible_answer"):
        _load(tmp_path, bare)
    beside = tmp_path / "possible_answer" / "rows.json"
    beside.parent.mkdir()
    beside.write_text(json.dumps({"id": "1", "ground_truth": []}))
    with pytest.raises(DataError, match="has no row '0'"):
        _load(tmp_path, bare)
    beside.rename(tmp_path / "possible_answer" / "others.json")
    beside = beside.with_name("others.json")
    beside.write_text(json.dumps({"id": "0", "ground_truth": ROW["ground_truth"]}))
    assert _load(tmp_path, bare, "others.json")[0].answers == problem.answers


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"missed_function": {}}, "missed_function"),
        ({"initial_config": None}, "initial_config"),
        ({"question": "Add."}, "question"),
        ({"question": [[]]}, "question"),
        ({"question": [[{"role": "system", "content": "Add."}]]}, "question"),
        ({"ground_truth": []}, "ground_truth"),
    ],
)
def test_a_wrong_row_is_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1, field '{field}'"):
        _load(tmp_path, {**ROW, **changes})


def _load(folder: Path, row: dict[str, Any], name: str = "rows.json") -> list[Problem]:
    path = folder / name
    path.write_text(json.dumps(row) + "\n")
    return load_jsonl(path)


def _share(made: list[list[list[str]]], problem: Problem) -> float:
    return share_met(json.dumps(made), *problem.answers)

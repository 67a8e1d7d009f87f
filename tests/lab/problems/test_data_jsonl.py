# SPDX-License-Identifier: Apache-2.0
"""Questions from JSON lines: rows in the forms of the usual sets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo.lab.problems import DataError, load_jsonl
from vllm_choreo.lab.problems.grading import is_correct


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


MATH = {
    "problem": "What is $\\frac{1}{2}$ of $\\frac{2}{3}$?",
    "level": "Level 1",
    "solution": "Multiply: $\\frac{1}{2} \\cdot \\frac{2}{3} = \\boxed{\\frac{1}{3}}$.",
}
GSM8K = {"question": "Two and two hens?", "answer": "2 + 2 = <<2+2=4>>4 hens.\n#### 4"}
TRIVIA = {"question": "Which metal is Fe?", "answers": ["Iron", "Fe (metal)"]}
COMMONGEN = {"concepts": ["dog", "run", "field"]}


@pytest.mark.parametrize("name", ["file.jsonl", "gsm8k.jsonl", "commongen.jsonl"])
def test_what_a_row_is_follows_from_its_content(tmp_path: Path, name: str) -> None:
    math, gsm8k, trivia, concepts = load_jsonl(
        write(tmp_path / name, MATH, GSM8K, TRIVIA, COMMONGEN)
    )
    assert (math.kind, math.answers, math.question) == ("math", ("\\frac{1}{3}",), MATH["problem"])
    assert (gsm8k.kind, gsm8k.answers) == ("number", ("4",))
    assert (trivia.kind, trivia.answers) == ("trivia", ("Iron", "Fe (metal)"))
    assert (concepts.kind, concepts.answers) == ("concepts", ("dog", "run", "field"))
    assert "dog, run, field" in concepts.question
    assert [p.id for p in (math, concepts)] == [f"{Path(name).stem}/{line}" for line in (1, 4)]


@pytest.mark.parametrize(
    ("row", "kind", "answers"),
    [
        ({"question": "?", "answer": 42}, "number", ("42",)),
        ({"question": "?", "answer": "1,200"}, "number", ("1,200",)),
        ({"question": "?", "answer": "$x^2$"}, "math", ("$x^2$",)),
        ({"question": "?", "answer": "a blue whale"}, "trivia", ("a blue whale",)),
        ({"problem": "?", "answer": "7", "solution": "So \\boxed{7}."}, "math", ("7",)),
        ({"problem": "?", "answer": "7", "solution": "So 7.\n#### 7"}, "number", ("7",)),
        ({"question": "?", "solution": "3 + 4\n#### 7"}, "number", ("7",)),
        (
            {"question": "?", "answer": {"value": "Rome", "aliases": ["Roma", "Rome"]}},
            "trivia",
            ("Rome", "Roma"),
        ),
    ],
)
def test_answers_are_found_where_they_stand(
    tmp_path: Path, row: dict[str, Any], kind: str, answers: tuple[str, ...]
) -> None:
    (problem,) = load_jsonl(write(tmp_path / "rows.jsonl", row))
    assert (problem.kind, problem.answers) == (kind, answers)


def test_documents_come_with_the_question(tmp_path: Path) -> None:
    passages = {
        **TRIVIA,
        "id": "nq/7",
        "ctxs": [{"title": "Iron", "text": "Iron is a metal."}, {"text": "It rusts."}],
    }
    records = {"ordered_kv_records": [["a", "1f"], ["b", "2e"]], "key": "b", "value": "2e"}
    first, second = load_jsonl(write(tmp_path / "rows.jsonl", passages, records))
    assert first.id == "nq/7"
    assert first.documents == ("Iron\nIron is a metal.", "It rusts.")
    assert (second.kind, second.answers, second.documents) == ("trivia", ("2e",), ("a: 1f\nb: 2e",))
    assert is_correct("trivia", second.documents[0], second.answers)


def test_limit_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(GSM8K)}\n\n{json.dumps(TRIVIA)}\nnot read")
    assert [p.id for p in load_jsonl(path, limit=2)] == ["rows/2", "rows/4"]
    assert load_jsonl(path, limit=0) == []


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"text": "?"}, "", "no field that is known; a row has concepts; or question"),
        ({"question": "?"}, "answer", "missing"),
        ({"question": "", "answer": "4"}, "question", "must be a string that is not empty"),
        ({"question": "?", "answer": None}, "answer", "not None"),
        ({"question": "?", "answer": True}, "answer", "not True"),
        ({"question": "?", "answers": "Rome"}, "answers", "must be a list of strings"),
        ({"question": "?", "answers": []}, "answers", "must be a list of strings"),
        ({"question": "?", "answer": {"aliases": ["x"]}}, "value", "must be a string"),
        ({"question": "?", "solution": "It is hard."}, "solution", r"write it into \boxed{}"),
        ({"question": "?", "answers": ["x"], "ctxs": ["y"]}, "ctxs", "title and text"),
        ({"question": "?", "answers": ["x"], "ctxs": [{"title": "y"}]}, "text", "must be a string"),
        ({"concepts": [1, 2]}, "concepts", "must be a list of strings"),
        ({"ordered_kv_records": [["a"]], "key": "a", "value": "1"}, "ordered_kv_records", "pairs"),
        ({"ordered_kv_records": [["a", "1"]], "key": "b", "value": "1"}, "key", "no pair of"),
        ({"entry_point": "f", "test": "check"}, "prompt", "must be a string"),
        ({"entry_point": "f()", "prompt": "def f():", "test": "x"}, "entry_point", "name of a"),
        ([1], "", "a list, not an object"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(
    tmp_path: Path, row: Any, field: str, reason: str
) -> None:
    path = write(tmp_path / "rows.jsonl", GSM8K, row)
    with pytest.raises(DataError) as caught:
        load_jsonl(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (path, 2, field)
    assert reason in str(error)
    named = f", field {field!r}" if field else ""
    assert str(error).startswith(f"{path}, line 2{named}: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no rows"),
        (b"\xff\xfe", "not UTF-8"),
        (b'[\n{"question": "?"}]', "line 1: not JSON"),
        (b'{"question": "?", "answer": "4"}\n{"question": "?', "line 2: not JSON"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_jsonl(path)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_jsonl(tmp_path / "none.jsonl")


# -- long documents ------------------------------------------------------------------------------

MUSIQUE = {
    "id": "2hop__1",
    "question": "Who owns the shed?",
    "answer": "Anna",
    "answer_aliases": ["Anna B."],
    "paragraphs": [
        {"idx": 0, "title": "Shed", "paragraph_text": "It is green.", "is_supporting": False},
        {"idx": 1, "title": "Anna", "paragraph_text": "Owns it.", "is_supporting": True},
    ],
}
HOTPOT = {
    "_id": "5a",
    "question": "Who owns it?",
    "answer": "Anna",
    "context": [["Shed", ["It is green.", " It is old."]], ["Anna", ["Owns it."]]],
}
COLUMNS = {"title": ["Shed", "Anna"], "sentences": [["It is green.", " It is old."], ["Owns it."]]}
LONGBENCH = {"input": "Who owns it?", "context": "Anna owns\nit.", "answers": ["Anna"]}


def test_documents_of_the_usual_sets(tmp_path: Path) -> None:
    rows = (MUSIQUE, HOTPOT, {**HOTPOT, "context": COLUMNS}, LONGBENCH)
    musique, hotpot, columns, long = load_jsonl(write(tmp_path / "d.jsonl", *rows))
    assert musique.documents == ("Shed\nIt is green.", "Anna\nOwns it.")
    assert (musique.answers, musique.id) == (("Anna", "Anna B."), "2hop__1")
    assert (
        hotpot.documents
        == columns.documents
        == (
            "Shed\nIt is green. It is old.",
            "Anna\nOwns it.",
        )
    )
    assert long.documents == ("Anna owns\nit.",) and long.question == "Who owns it?"
    assert {p.kind for p in (musique, hotpot, columns, long)} == {"trivia"}
    (none,) = load_jsonl(write(tmp_path / "n.jsonl", {**MUSIQUE, "answer_aliases": []}))
    assert none.answers == ("Anna",)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context": [["Shed", "It is green."]]}, "context"),
        ({"context": {"title": ["a"], "sentences": []}}, "context"),
        ({"context": 3}, "context"),
        ({"context": " "}, "context"),
        ({"paragraphs": ["text"], "context": None}, "context"),
    ],
)
def test_documents_that_are_none(tmp_path: Path, change: Any, field: str) -> None:
    with pytest.raises(DataError) as refused:
        load_jsonl(write(tmp_path / "d.jsonl", {**HOTPOT, **change}))
    assert refused.value.field == field

# SPDX-License-Identifier: Apache-2.0
"""Questions from JSON lines: the usual files of MATH, GSM8K, TriviaQA, CommonGen, NaturalQuestions
and HumanEval, BFCL's of several turns, and, with long documents, MuSiQue, HotpotQA and LongBench.

What a row is follows from its fields and from what stands in them, not from the file's name:

| fields | kind |
|---|---|
| `concepts` | concepts |
| `ordered_kv_records`, `key`, `value` | trivia |
| `prompt`, `entry_point`, `test` | code |
| `question`, `involved_classes`, `initial_config`, `ground_truth` | calls |
| `question`, `problem` or `input`, `answers` | trivia |
| the same, `answer` and `answer_aliases` | trivia |
| `question` or `problem`, `answer` or `solution` | math with a box; else number if the answer is |
| | one; else math if there is other LaTeX; else trivia |

The problem's documents are the records; or what stands beside a question: `title` and `text` of
`ctxs`; `title` and `paragraph_text` of `paragraphs` (MuSiQue); titles and sentences of `context`
(HotpotQA, as its own files or as columns), or `context` itself if it is text (LongBench).

A row of BFCL without `ground_truth` has that of the same `id` in the file of the same name in the
folder `possible_answer`, where BFCL has it.

`id`, or `task_id`, is taken if there is one. Other fields are ignored.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.lab.problems.functions import code_question
from vllm_choreo.lab.problems.grading import final_answer
from vllm_choreo.lab.problems.latex import last_boxed
from vllm_choreo.lab.problems.numbers import number
from vllm_choreo.lab.problems.problem import Kind, Problem
from vllm_choreo.lab.problems.words import concepts_question

_FORMS = (
    "a row has concepts; or question or problem, with answer, answers or solution; or "
    "ordered_kv_records, key and value; or prompt, entry_point and test; or question, "
    "involved_classes, initial_config and ground_truth"
)


class DataError(ValueError):
    """A file that is not what it should be; says where, and what to do.

    Attributes:
        path, line: the file, and the line from 1; 0 if it is the file as a whole.
        field: field of the row; empty if it is the row as a whole.
    """

    def __init__(self, message: str, path: Path, line: int = 0, field: str = "") -> None:
        where = f"{path}, line {line}" if line else str(path)
        super().__init__(f"{where}{f', field {field!r}' if field else ''}: {message}")
        self.path, self.line, self.field = path, line, field


class _FieldError(Exception):
    """A field that is not what it should be; the caller knows in which row it is."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def load_jsonl(path: str | Path, limit: int | None = None) -> list[Problem]:
    """The problems of a file in their order; rows without an `id` are `file/line`.

    Args:
        path: file with one JSON object a line, in UTF-8; empty lines are skipped.
        limit: read that many rows at most.

    Raises:
        DataError: the file, a line or a field is not what it should be.
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error}); convert it with iconv", path) from None
    problems: list[Problem] = []
    for line, text in enumerate(lines, start=1):
        if limit is not None and len(problems) >= limit:
            break
        if text.strip():
            problems.append(_problem(text, path, line))
    if not problems and limit != 0:
        raise DataError("no rows; give a file with one JSON object a line", path)
    return problems


def _problem(text: str, path: Path, line: int) -> Problem:
    """The problem of one line."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        advice = "each line must be one whole JSON object (jq -c '.[]' makes such lines of a list)"
        raise DataError(f"not JSON ({error.msg}); {advice}", path, line) from None
    if not isinstance(row, dict):
        raise DataError(f"a {type(row).__name__}, not an object; {_FORMS}", path, line)
    try:
        if "involved_classes" in row and "ground_truth" not in row:
            row["ground_truth"] = _possible_answer(path, row.get("id"))
        kind, question, answers, documents = _parts(row)
    except _FieldError as error:
        raise DataError(str(error), path, line, error.field) from None
    name = row.get("id", row.get("task_id", f"{path.stem}/{line}"))
    return Problem(str(name), question, answers, kind, documents)


_Parts = tuple[Kind, str, tuple[str, ...], tuple[str, ...]]


def _parts(row: Mapping[str, Any]) -> _Parts:
    """Kind, question, answers and documents of a row."""
    if "concepts" in row:
        concepts = _strings(row, "concepts")
        return "concepts", concepts_question(concepts), concepts, ()
    if "ordered_kv_records" in row:
        return _records(row)
    if "entry_point" in row:
        return _function(row)
    if "involved_classes" in row:
        return _requests(row)
    name = next((name for name in ("question", "problem", "input") if name in row), "")
    if not name:
        raise _FieldError("", f"no field that is known; {_FORMS}")
    question = _string(row, name)
    if "answers" in row:
        return "trivia", question, _strings(row, "answers"), _documents(row)
    kind, answers = _gold(row)
    return kind, question, answers, _documents(row)


def _gold(row: Mapping[str, Any]) -> tuple[Kind, tuple[str, ...]]:
    """Kind and answers of a row with `answer`, `solution` or both."""
    given = row.get("answer")
    if "answer_aliases" in row:
        aliases = _strings(row, "answer_aliases") if row["answer_aliases"] else ()
        return "trivia", tuple(dict.fromkeys((_string(row, "answer"), *aliases)))
    if isinstance(given, Mapping):  # TriviaQA's own files: {"value": …, "aliases": […]}
        aliases = _strings(given, "aliases") if "aliases" in given else ()
        return "trivia", tuple(dict.fromkeys((_string(given, "value"), *aliases)))
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return "number", (str(given),)
    texts = [_string(row, name) for name in ("answer", "solution") if name in row]
    if not texts:
        raise _FieldError("answer", f"missing; {_FORMS}")
    gold = texts[0]
    if "answer" not in row or "####" in gold or last_boxed(gold) is not None:
        found = final_answer(gold)
        if found is None:
            raise _FieldError(
                "solution" if "answer" not in row else "answer",
                r"no final answer in it: write it into \boxed{}, after ####, or into `answer`",
            )
        gold = found
    if any(last_boxed(text) is not None for text in texts):
        return "math", (gold,)
    if number(gold) is not None:
        return "number", (gold,)
    return ("math" if "\\" in gold or "$" in gold else "trivia"), (gold,)


def _records(row: Mapping[str, Any]) -> _Parts:
    """Parts of a row with pairs of keys and values, and a key to look up."""
    pairs = row["ordered_kv_records"]
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise _FieldError("ordered_kv_records", "must be a list of pairs of strings")
    key, value = _string(row, "key"), _string(row, "value")
    if [key, value] not in pairs:
        raise _FieldError("key", "key and value are no pair of ordered_kv_records")
    document = "\n".join(f"{name}: {content}" for name, content in pairs)
    return "trivia", f"What is the value of {key}?", (value,), (document,)


def _function(row: Mapping[str, Any]) -> _Parts:
    """Parts of a row of HumanEval: the first lines of a function, and a test of it by name."""
    name, head = _string(row, "entry_point"), _string(row, "prompt")
    if not name.isidentifier():
        raise _FieldError("entry_point", f"must be the name of a function, not {name!r:.80}")
    return "code", code_question(head), (head, f"{_string(row, 'test')}\n\ncheck({name})"), ()


def _requests(row: Mapping[str, Any]) -> _Parts:
    """Parts of a row of BFCL: what a user says turn by turn, and what is to be called for it."""
    classes, wanted = _strings(row, "involved_classes"), row["ground_truth"]
    if "missed_function" in row:
        raise _FieldError("missed_function", "functions that come later are not supported")
    if not isinstance(row.get("initial_config"), Mapping):
        raise _FieldError("initial_config", "must be an object, the state of each class")
    turns = row.get("question")
    if not isinstance(turns, list) or not turns or not all(map(_is_user_turn, turns)):
        raise _FieldError("question", "must be a list of lists of one turn of a user each")
    if not isinstance(wanted, list) or len(wanted) != len(turns):
        raise _FieldError("ground_truth", "must be a list of calls for each turn of question")
    scenario = {
        "id": str(row.get("id", "")),
        "involved_classes": list(classes),
        "initial_config": row["initial_config"],
        "excluded_function": list(row.get("excluded_function") or ()),
        "requests": [turn[0]["content"] for turn in turns],
    }
    question = "\n\n".join(scenario["requests"])
    return "calls", question, (json.dumps(scenario), json.dumps(wanted)), ()


def _is_user_turn(turn: object) -> bool:
    return (
        isinstance(turn, list)
        and len(turn) == 1
        and isinstance(turn[0], Mapping)
        and turn[0].get("role") == "user"
        and isinstance(turn[0].get("content"), str)
    )


def _possible_answer(path: Path, name: object) -> object:
    """Return what is to be called for a row of BFCL, from the file beside its own."""
    place = path.parent / "possible_answer" / path.name
    try:
        found = _possible_answers(place).get(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _FieldError(
            "ground_truth", f"missing, and {place} cannot be read ({error})"
        ) from None
    if found is None:
        raise _FieldError("ground_truth", f"missing, and {place} has no row {name!r}")
    return found


@functools.lru_cache(maxsize=1)
def _possible_answers(place: Path) -> Mapping[object, object]:
    rows = map(json.loads, filter(str.strip, place.read_text("utf-8").splitlines()))
    return {row["id"]: row["ground_truth"] for row in rows}


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and [type(part) for part in pair] == [str, str]


def _documents(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts beside a question, each under its title."""
    if isinstance(row.get("context"), str):
        return (_string(row, "context"),)
    if "context" in row:
        return _titled_sentences(row["context"])
    name, text = ("paragraphs", "paragraph_text") if "paragraphs" in row else ("ctxs", "text")
    found = row.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise _FieldError(name, f"must be a list of objects with title and {text}")
    return tuple(
        f"{_string(entry, 'title')}\n{_string(entry, text)}"
        if "title" in entry
        else _string(entry, text)
        for entry in found
    )


def _titled_sentences(found: object) -> tuple[str, ...]:
    """Documents of HotpotQA: pairs of a title and sentences, or a column of each."""
    if isinstance(found, Mapping) and {"title", "sentences"} <= found.keys():
        columns = (found["title"], found["sentences"])
        if all(isinstance(column, list) for column in columns) and len({*map(len, columns)}) == 1:
            found = [list(pair) for pair in zip(*columns, strict=True)]
    if not isinstance(found, list) or not all(map(_is_titled, found)):
        raise _FieldError("context", "must be text, or titles with lists of sentences")
    return tuple(f"{title}\n{''.join(sentences).strip()}" for title, sentences in found)


def _is_titled(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and [type(part) for part in pair] == [str, list]
        and all(isinstance(sentence, str) for sentence in pair[1])
    )


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _FieldError(name, f"must be a string that is not empty, not {value!r:.80}")
    return value


def _strings(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row[name]
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(isinstance(v, str) and v.strip() for v in value):
        raise _FieldError(name, f"must be a list of strings that are not empty, not {value!r:.80}")
    return tuple(value)

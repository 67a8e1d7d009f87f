# SPDX-License-Identifier: Apache-2.0
"""Answers that are programs: found in what a model says, run with consent, held within bounds."""

from __future__ import annotations

import ast
import itertools
import json
import os
from pathlib import Path

import pytest

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.problems import functions, load_jsonl
from vllm_choreo.lab.problems.grading import is_correct
from vllm_choreo.lab.problems.programs import CONSENT, passes, program_in

HEAD = 'def double(x):\n    """Return twice x."""\n'
TEST = "assert double(2) == 4"


@pytest.mark.parametrize(
    "text",
    [
        "    return 2 * x",
        "\n    return 2 * x\n",
        "def double(x):\n    return 2 * x\n```\nThat is it.",
        "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles.",
        "Run `pip`:\n```\npip\n```\nthen\n```py\ndef double(x):\n    return 2 * x",
        "import math\n\ndef double(x):\n    return math.prod((2, x))\n",
        "from __future__ import annotations\n\ndef double(x: Any):\n    return 2 * x\n",
    ],
)
def test_a_program_is_found_in_what_is_said(text: str) -> None:
    assert passes(text, HEAD, TEST)
    assert not passes(text.replace("2", "3"), HEAD, TEST)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know.",
        "def double(x):\n    return",
        "def double(x)\n    return 2 * x",  # no program
        "def double(y):\n    import sys; sys.exit(0)",
        "def double(y):\n    import os; os._exit(0)",
        "def other(x):\n    return 2 * x",
    ],
)
def test_what_does_not_reach_the_end_of_the_test_has_not_passed(text: str) -> None:
    assert not passes(text, HEAD, TEST)


def test_what_takes_too_much_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm_choreo.lab.problems.programs._SECONDS", 1)
    sleeper = tmp_path / "pid"
    sleeping = f"open({str(sleeper)!r}, 'w').write(str(__import__('os').getpid()))"
    for body in (
        "    while True: pass",
        "    return len(bytes(2**40))",
        f"    {sleeping}\n    import time; time.sleep(1000)",
    ):
        assert not passes(body, HEAD, TEST)
    with pytest.raises(ProcessLookupError):
        os.kill(int(sleeper.read_text()), 0)


def test_a_program_sees_neither_this_process_nor_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert passes("    import os; return len(os.listdir()) + len(os.getenv('SECRET', ''))", HEAD,
                  "assert double(2) == 0")  # fmt: skip


def test_nothing_is_run_without_consent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CONSENT)
    trace = tmp_path / "trace"
    with pytest.raises(ChoreoError, match=f"set {CONSENT}=1"):
        passes(f"open({str(trace)!r}, 'w')", HEAD, TEST)
    assert not trace.exists()


def test_the_first_block_with_a_definition_is_the_program() -> None:
    assert program_in("a\n```python\ndef f(): 1\n```\n```\ndef g(): 2\n```") == "\ndef f(): 1\n"
    assert program_in("  return 1\n```\nSo.") == "  return 1\n"


def test_made_functions_are_tested_by_what_they_say() -> None:
    """The example in a function's text and its test are of one function, and tell others apart."""
    problems = functions(40, 3)
    assert functions(12, 3) == problems[:12] and functions(40, 4) != problems
    for problem, other in itertools.pairwise(problems[:9]):
        head, test = problem.answers
        assert head.strip() in problem.question
        cases = [line.removeprefix("assert ").partition(" == ")[::2] for line in test.splitlines()]
        assert len(cases) == 5
        by_case = {ast.unparse(_argument(call)): ast.literal_eval(value) for call, value in cases}
        table = f"    return {by_case!r}[repr({head[head.index('(') + 1 : head.index(')')]})]\n"
        assert is_correct("code", table, problem.answers)
        assert not is_correct("code", table, other.answers)


def _argument(call: str) -> ast.expr:
    (argument,) = ast.parse(call, mode="eval").body.args  # type: ignore[attr-defined]
    assert isinstance(argument, ast.expr)
    return argument


def test_rows_of_human_eval_are_read(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": HEAD, "entry_point": "double"}
    row["test"] = "def check(candidate):\n    assert candidate(2) == 4\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (problem,) = load_jsonl(path)
    assert (problem.id, problem.kind) == ("HumanEval/0", "code")
    assert HEAD.strip() in problem.question
    assert is_correct("code", "    return x + x", problem.answers)
    assert not is_correct("code", "    return x", problem.answers)

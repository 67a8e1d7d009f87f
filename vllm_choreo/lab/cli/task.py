# SPDX-License-Identifier: Apache-2.0
"""One run of a workflow: what it is given, and what is known of the right answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.problems import Problem
from vllm_choreo.lab.problems.grading import coverage, is_correct
from vllm_choreo.lab.problems.programs import check_code_may_run
from vllm_choreo.transcript.transcript import Transcript

_MAX_SHOWN = 4  # of the ways to write an answer


@dataclass(frozen=True)
class Task:
    """One run of a workflow.

    Attributes:
        id: id of the problem.
        source: the set or file that it is from.
        inputs: the arguments of the workflow's function, but for `c` and `on_step`.
        problems: problems with their right answers; two in `multi_qa`, none in a game.
        recorded: the run whose tokens are to be generated again; None: sample.
    """

    id: str
    source: str
    inputs: dict[str, Any]
    problems: tuple[Problem, ...]
    recorded: Transcript | None = None

    def expected(self) -> list[str]:
        """The right answer of each problem, for a reader."""
        return [_expected(problem) for problem in self.problems]

    def is_right(self, answers: Sequence[str]) -> bool | None:
        """Return whether most of the answers are right, on each problem; None if nobody knows."""
        if not self.problems:
            return None
        return all(_most_right(problem, answers) for problem in self.problems)

    def coverage(self, answers: Sequence[str]) -> float | None:
        """Share of what is asked for that the answers hold, from 0 to 1; None if nobody knows.

        Of several problems the share that most answers have right; of concepts the share that
        occurs, in the mean of the answers.
        """
        if not self.problems or not answers:
            return None
        return fmean(
            fmean(coverage(text, problem.answers) for text in answers)
            if problem.kind == "concepts"
            else _most_right(problem, answers)
            for problem in self.problems
        )


def _most_right(problem: Problem, answers: Sequence[str]) -> bool:
    right = sum(is_correct(problem.kind, text, problem.answers) for text in answers)
    return 2 * right > len(answers)


def _expected(problem: Problem) -> str:
    if problem.kind == "concepts":
        return ", ".join(problem.answers)
    if problem.kind == "code":
        return "passes its test"
    if problem.kind == "calls":
        return "all requests met"
    return " / ".join(problem.answers[:_MAX_SHOWN])


def check_may_be_judged(problems: Iterable[Problem]) -> None:
    """Refuse problems before the first run, and not when that is judged.

    Raises:
        ChoreoError: answers are programs, which may not be run here.
    """
    if any(problem.kind == "code" for problem in problems):
        check_code_may_run()


def transcript_json(task: Task, transcript: Transcript) -> dict[str, Any]:
    """The transcript as it is saved: with its problems, so that a replay can be judged."""
    return {**transcript.to_json(), "task": about_task(task)}


def about_task(task: Task) -> dict[str, Any]:
    """A task's problems with their right answers, as plain data."""
    return {"id": task.id, "source": task.source, "problems": [asdict(p) for p in task.problems]}


def program_of(workflow: str) -> Callable[..., Transcript]:
    """The function of a workflow, by its name."""
    module = importlib.import_module(f"vllm_choreo.lab.workflows.{workflow}")
    program: Callable[..., Transcript] = getattr(module, workflow)
    return program


def unreadable(path: Path, error: OSError) -> ChoreoError:
    """The refusal of a file that cannot be read."""
    return ChoreoError(f"cannot read {path}: {error.strerror}")

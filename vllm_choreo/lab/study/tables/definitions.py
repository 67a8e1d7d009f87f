# SPDX-License-Identifier: Apache-2.0
"""The tables of the paper: a workflow for each, how it is sampled, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.problems.function_calls import share_met
from vllm_choreo.lab.problems.grading import coverage, is_correct
from vllm_choreo.lab.study.scores import Judged
from vllm_choreo.lab.workflows.prisoners_dilemma import STRATEGIES

# Given a task and the answers to it: whether they are right, or how much of what was asked for
# they hold, from 0 to 1.
Measure = Callable[[Task, Sequence[str]], bool | float | None]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, as this package runs it.

    Attributes:
        number: its number in the paper; None: it is none of that paper's.
        workflow: the name of its function.
        text: words for the help: calls that are made, and things that are counted.
        data: content of the file of problems; empty: it needs none.
        measures: measures of each problem's answers, by name.
        max_tokens: largest number of tokens of an answer.
        temperature: temperature of sampling.
        groups: inputs of the workflow that each group of problems has in place of its own, by the
            group's name.
    """

    number: int | None
    workflow: str
    text: str
    data: str
    measures: Mapping[str, Measure]
    max_tokens: int
    temperature: float = 0.7
    groups: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"": {}})

    def grouped(self, tasks: Sequence[Task]) -> dict[str, list[Task]]:
        """The tasks of each group; a task's id says which."""
        return {
            name: [
                replace(
                    task,
                    id=f"{name}, {task.id}" if name else task.id,
                    inputs={**task.inputs, **inputs},
                )
                for task in tasks
            ]
            for name, inputs in self.groups.items()
        }


def measured(measure: Measure, task: Task, judged: Judged) -> Judged:
    """A judgement by one measure alone."""
    value = measure(task, judged.answers)
    if isinstance(value, bool):
        return replace(judged, is_right=value, coverage=None)
    return replace(judged, is_right=None, coverage=value)


def _is_right(task: Task, answers: Sequence[str]) -> bool | None:
    return task.is_right(answers)


def _answers_question(number: int) -> Measure:
    def measure(task: Task, answers: Sequence[str]) -> bool:
        problem = task.problems[number]
        return all(is_correct(problem.kind, text, problem.answers) for text in answers)

    return measure


def _covers(task: Task, answers: Sequence[str]) -> float:
    """Share of all concepts that the merged story holds."""
    (problem,), (story,) = task.problems, answers
    return coverage(story, problem.answers)


def _meets(task: Task, answers: Sequence[str]) -> float:
    """Share of a user's requests that were met before the first that was not."""
    (problem,), (made,) = task.problems, answers
    return share_met(made, *problem.answers)


def _cooperates(player: int) -> Measure:
    return lambda task, answers: answers[player] == "cooperate"


def _math(workflow: str, text: str) -> PaperTable:
    return PaperTable(
        4,
        workflow,
        f"{text}: right answers",
        "mathematical problems, as of GSM8K or MATH",
        {"right": _is_right},
        max_tokens=256,
    )


TABLES = {
    table.workflow: table
    for table in (
        PaperTable(
            1,
            "multi_qa",
            "two questions, one answer: both right, and each",
            "questions, as of TriviaQA, of which each run takes two",
            {
                "both": _is_right,
                "question 1": _answers_question(0),
                "question 2": _answers_question(1),
            },
            max_tokens=64,
        ),
        PaperTable(
            2,
            "branch_solve_merge",
            "two stories merged: concepts that the merged one holds",
            "concepts, as of CommonGen-hard",
            {"concepts": _covers},
            max_tokens=256,
        ),
        PaperTable(
            3,
            "prisoners_dilemma",
            "games with private plans: how often Bob cooperates, by what Alice is told in secret",
            "",
            {"Bob cooperates": _cooperates(1), "Alice cooperates": _cooperates(0)},
            max_tokens=80,
            groups={f"Alice: {name}": {"strategies": [name, "none"]} for name in STRATEGIES},
        ),
        _math("tree_of_thoughts", "candidates, votes and an answer"),
        _math("iterative_debate", "two sides and a moderator"),
        _math("parallel_debate", "agents that revise after reading one another"),
        PaperTable(
            None,
            "code_review",
            "a coder, a tester and a reviewer, as in KVCOMM: functions that pass their tests",
            "functions, as of HumanEval",
            {"passed": _is_right},
            max_tokens=320,
            temperature=0.0,
        ),
        PaperTable(
            None,
            "function_calls",
            "a coder, a tester and a reviewer at a user's requests: requests that are met",
            "requests, as of BFCL's multi_turn_base",
            {"all": _is_right, "requests": _meets},
            max_tokens=96,
            temperature=0.0,
        ),
    )
}

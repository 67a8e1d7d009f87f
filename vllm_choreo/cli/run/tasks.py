# SPDX-License-Identifier: Apache-2.0
"""What a workflow is run on: problems from a seed or a file, or recorded runs to be replayed."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_choreo.cli.run.engine import LocalEngine, Server
from vllm_choreo.cli.run.options import OPTIONS
from vllm_choreo.errors import ChoreoError
from vllm_choreo.workflows.problems import (
    DataError,
    Problem,
    algebra,
    arithmetic,
    concept_lists,
    load_jsonl,
    trivia,
    word_problems,
)
from vllm_choreo.workflows.problems.grading import is_correct
from vllm_choreo.workflows.record.transcript import Transcript

DEFAULT_LIMIT, DEFAULT_MAX_TOKENS = 3, 128
# Where calls ask the same, they must not all say the same; elsewhere the likeliest answer is best.
DEFAULT_TEMPERATURE = {"tree_of_thoughts": 0.7, "parallel_debate": 0.7}
# Of calls that need to say one word only, as votes and decisions.
SHORT_TOKENS = 16

_MAX_SHOWN = 4  # of the ways to write an answer

SETS: dict[str, Callable[[int, int], list[Problem]]] = {
    "direct": trivia,
    "tree_of_thoughts": word_problems,
    "parallel_debate": arithmetic,
    "iterative_debate": algebra,
    "multi_qa": trivia,
    "branch_solve_merge": functools.partial(concept_lists, size=10),
}
_SHORT = {
    "tree_of_thoughts": "vote_params",
    "iterative_debate": "verdict_params",
    "prisoners_dilemma": "decision_params",
}
# How an answer is to be given, so that it is found in what the model says.
_FORM = {
    "number": "\nThink step by step. End with the answer alone, after ####.",
    "math": "\nThink step by step. Put the final answer into \\boxed{}.",
    "trivia": "",
    "concepts": "",
}


@dataclass(frozen=True)
class Task:
    """One run of a workflow.

    Attributes:
        id: of the problem.
        source: the set or file that it is from.
        inputs: the arguments of the workflow's function, but for `c` and `on_step`.
        problems: what is known of the right answer; two in `multi_qa`, none in a game.
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
        """Whether most of the answers are right, on each problem; None if nobody knows."""
        if not self.problems:
            return None
        return all(
            2 * sum(is_correct(problem.kind, text, problem.answers) for text in answers)
            > len(answers)
            for problem in self.problems
        )


def _expected(problem: Problem) -> str:
    if problem.kind == "concepts":
        return ", ".join(problem.answers)
    return " / ".join(problem.answers[:_MAX_SHOWN])


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks that the command line asks for.

    Raises:
        ChoreoError: a file cannot be read, or does not suit the workflow.
    """
    if args.replay:
        return _replayed(args)
    options = {name: getattr(args, name) for name in OPTIONS.get(args.workflow, {})}
    options = {name: value for name, value in options.items() if value is not None}
    if args.workflow == "prisoners_dilemma":
        return [
            Task(f"game {i + 1}", "game", {**options, **_sampling(args, i)}, ())
            for i in range(args.limit or 1)
        ]
    groups = _groups(args.workflow, _problems(args))
    options |= _sampling(args)
    return [
        Task(
            id=" + ".join(problem.id for problem in group),
            source=args.data.name if args.data else group[0].id.partition("/")[0],
            inputs=_inputs(args.workflow, group) | options,
            problems=group,
        )
        for group in groups
    ]


def _problems(args: argparse.Namespace) -> list[Problem]:
    per_run = 2 if args.workflow == "multi_qa" else 1
    if args.data is None:
        seed = args.seed or 0
        return SETS[args.workflow]((args.limit or DEFAULT_LIMIT) * per_run, seed)
    try:
        return load_jsonl(args.data, args.limit and args.limit * per_run)
    except DataError as error:
        raise ChoreoError(str(error)) from error
    except OSError as error:
        raise _unreadable(args.data, error) from error


def _groups(workflow: str, problems: Sequence[Problem]) -> list[tuple[Problem, ...]]:
    """The problems of each run."""
    if workflow == "branch_solve_merge":
        for problem in problems:
            if problem.kind != "concepts" or len(problem.answers) < 2:
                raise ChoreoError(
                    "branch_solve_merge needs rows with two or more concepts",
                    parameter="data",
                    value=problem.id,
                )
    if workflow != "multi_qa":
        return [(problem,) for problem in problems]
    if len(problems) % 2:
        raise ChoreoError(
            "multi_qa takes two questions at a time, and one is left over",
            parameter="data",
            value=problems[-1].id,
        )
    return list(zip(problems[::2], problems[1::2], strict=True))


def _inputs(workflow: str, group: Sequence[Problem]) -> dict[str, Any]:
    if workflow == "branch_solve_merge":
        return {"concepts": list(group[0].answers)}
    texts = ["\n\n".join([*p.documents, p.question]) + _FORM[p.kind] for p in group]
    return {"questions": texts} if workflow == "multi_qa" else {"question": texts[0]}


def _sampling(args: argparse.Namespace, number: int = 0) -> dict[str, Any]:
    """The sampling parameters, by argument of the workflow; `number` is that of the game."""
    params = Server.sampling if args.server else LocalEngine.sampling
    max_tokens = args.max_tokens or DEFAULT_MAX_TOKENS
    temperature = args.temperature
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE.get(args.workflow, 0.0)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "seed": (args.seed or 0) + number,
    }
    sampling = {"sampling_params": params(max_tokens=max_tokens, **settings)}
    if args.workflow in _SHORT:
        short = params(max_tokens=min(max_tokens, SHORT_TOKENS), **settings)
        sampling[_SHORT[args.workflow]] = short
    return sampling


# -- recorded runs -------------------------------------------------------------------------------


def transcript_json(task: Task, transcript: Transcript) -> dict[str, Any]:
    """The transcript as it is saved: with its problems, so that a replay can be judged."""
    about = {"id": task.id, "source": task.source, "problems": [asdict(p) for p in task.problems]}
    return {**transcript.to_json(), "task": about}


def _replayed(args: argparse.Namespace) -> list[Task]:
    own = OPTIONS.get(args.workflow, {})
    for name in ("data", "limit", "seed", "max_tokens", "temperature", *own):
        if getattr(args, name, None) is not None:
            raise ChoreoError(
                f"the inputs of a replay are those of its transcript: leave out "
                f"--{name.replace('_', '-')}"
            )
    return [_recorded(args.workflow, path) for path in args.replay]


def _recorded(workflow: str, path: Path) -> Task:
    try:
        data = json.loads(path.read_text("utf-8"))
        task = _task(data, path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ChoreoError(f"{path} is no transcript of `vllm-choreo run` ({reason})") from error
    if data["workflow"] != workflow:
        raise ChoreoError(f"{path} is a transcript of {data['workflow']}, not of {workflow}")
    try:
        inspect.signature(program_of(workflow)).bind(None, **task.inputs)
    except TypeError as error:
        raise ChoreoError(f"{path} has other inputs than {workflow} takes ({error})") from error
    return task


def program_of(workflow: str) -> Callable[..., Transcript]:
    """The function of a workflow, by its name."""
    module = importlib.import_module(f"vllm_choreo.workflows.{workflow}")
    program: Callable[..., Transcript] = getattr(module, workflow)
    return program


def _task(data: dict[str, Any], path: Path) -> Task:
    """The task that a transcript is of; without problems if it was saved by another program."""
    transcript = Transcript.from_json(data)
    about = data.get("task", {"id": path.stem, "source": path.name, "problems": []})
    return Task(
        id=about["id"],
        source=about["source"],
        inputs={name: _argument(name, value) for name, value in transcript.inputs.items()},
        problems=tuple(_problem(problem) for problem in about["problems"]),
        recorded=transcript,
    )


def _argument(name: str, value: Any) -> Any:
    if not name.endswith("_params") or value is None:
        return value
    return LocalEngine.sampling(**value)


def _problem(fields: dict[str, Any]) -> Problem:
    lists = {name: tuple(fields[name]) for name in ("answers", "documents")}
    return Problem(**{**fields, **lists})


def _unreadable(path: Path, error: OSError) -> ChoreoError:
    return ChoreoError(f"cannot read {path}: {error.strerror}")

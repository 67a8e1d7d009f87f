# SPDX-License-Identifier: Apache-2.0
"""The tasks that a command line asks for: problems from a seed or a file, or recorded runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.cli.chat_turns import turns_of_model
from vllm_choreo.cli.engine import LocalEngine, RemoteEngine
from vllm_choreo.client.chat_turns import turns_of_server
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import OPTIONS
from vllm_choreo.lab.cli.recorded import recorded_tasks
from vllm_choreo.lab.cli.sets import DEFAULT_MAX_TOKENS, DEFAULT_SHORT_TOKENS, SETS, ProblemSet
from vllm_choreo.lab.cli.task import Task, check_may_be_judged, unreadable
from vllm_choreo.lab.problems import DataError, Problem, load_jsonl
from vllm_choreo.lab.workflows.chat import CHATML
from vllm_choreo.lab.workflows.prisoners_dilemma import NAMES

DEFAULT_LIMIT = 3
# Where calls ask the same, they must not all say the same; elsewhere the likeliest answer is best.
DEFAULT_TEMPERATURE = {"tree_of_thoughts": 0.7, "parallel_debate": 0.7}

_SHORT = {
    "tree_of_thoughts": "vote_params",
    "iterative_debate": "verdict_params",
    "prisoners_dilemma": "decision_params",
}
# What a workflow needs of each problem.
_NEEDED: dict[str, tuple[str, Callable[[Problem], bool]]] = {
    "branch_solve_merge": (
        "two or more concepts",
        lambda problem: problem.kind == "concepts" and len(problem.answers) > 1,
    ),
    "document_qa": ("documents", lambda problem: bool(problem.documents)),
    "code_review": (
        "prompt, entry_point and test",
        lambda problem: problem.kind == "code",
    ),
    "function_calls": (
        "question, involved_classes, initial_config and ground_truth",
        lambda problem: problem.kind == "calls",
    ),
}
# How an answer is to be given, so that it is found in what the model says.
_FORM = {
    "number": "\nThink step by step. End with the answer alone, after ####.",
    "math": "\nThink step by step. Put the final answer into \\boxed{}.",
    "trivia": "",
    "concepts": "",
    "code": "",
    "calls": "",
}


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks that the command line asks for.

    Raises:
        ChoreoError: a file cannot be read, or does not suit the workflow; or its answers are
            programs, which may not be run here.
    """
    if args.replay:
        return recorded_tasks(args)
    options = {name: getattr(args, name) for name in OPTIONS.get(args.workflow, {})}
    options = {name: value for name, value in options.items() if value is not None}
    if args.workflow == "prisoners_dilemma":
        options |= _turns(args)
        return [
            Task(
                f"game {i + 1}",
                "game",
                {"first": NAMES[i % 2], **options, **_sampling(args, i)},
                (),
            )
            for i in range(args.limit or 1)
        ]
    problems = _problems(args)
    groups = _groups(args.workflow, problems)
    check_may_be_judged(problems)
    options |= _turns(args)
    return [
        Task(
            id=" + ".join(problem.id for problem in group),
            source=args.data.name if args.data else group[0].id.partition("/")[0],
            inputs=_inputs(args.workflow, group) | options | _sampling(args, i),
            problems=group,
        )
        for i, group in enumerate(groups)
    ]


def _turns(args: argparse.Namespace) -> dict[str, Any]:
    """The argument `turns` of the workflow; none for a model that writes ChatML, the default."""
    if args.server is not None:
        turns = turns_of_server(args.server, args.api_key or os.environ.get("VLLM_API_KEY"))
    else:
        turns = turns_of_model(args.model, args.chat_template)
    return {} if turns == CHATML else {"turns": turns.to_json()}


def _problems(args: argparse.Namespace) -> list[Problem]:
    per_run = 2 if args.workflow == "multi_qa" else 1
    if args.data is None:
        num = (args.limit or DEFAULT_LIMIT) * per_run
        try:
            return _set(args).make(num, args.seed or 0)
        except ValueError as error:
            raise ChoreoError(str(error), parameter="limit", value=args.limit) from error
    if args.set is not None:
        raise ChoreoError("the problems are those of --data: leave out --set")
    try:
        return load_jsonl(args.data, args.limit and args.limit * per_run)
    except DataError as error:
        raise ChoreoError(str(error)) from error
    except OSError as error:
        raise unreadable(args.data, error) from error


def _set(args: argparse.Namespace) -> ProblemSet:
    sets = SETS.get(args.workflow)
    if sets is None:
        raise ChoreoError(f"no problems are made for {args.workflow}: name a file with --data FILE")
    return sets[args.set or next(iter(sets))]


def _groups(workflow: str, problems: Sequence[Problem]) -> list[tuple[Problem, ...]]:
    """The problems of each run."""
    if workflow in _NEEDED:
        needed, is_there = _NEEDED[workflow]
        for problem in problems:
            if not is_there(problem):
                raise ChoreoError(
                    f"{workflow} needs rows with {needed}", parameter="data", value=problem.id
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
    if workflow == "function_calls":
        scenario = json.loads(group[0].answers[0])
        return {"requests": scenario.pop("requests"), "scenario": scenario}
    if workflow == "document_qa":
        (problem,) = group
        question = problem.question + _FORM[problem.kind]
        documents = list(problem.documents)
        return {"question": question, "documents": documents, "opening": problem.opening}
    texts = ["\n\n".join([*p.documents, p.question]) + _FORM[p.kind] for p in group]
    return {"questions": texts} if workflow == "multi_qa" else {"question": texts[0]}


def _sampling(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """The sampling parameters, by argument of the workflow; `number` is that of the run."""
    params = RemoteEngine.sampling if args.server else LocalEngine.sampling
    max_tokens = args.max_tokens or _max_tokens(args)
    temperature = args.temperature
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE.get(args.workflow, 0.0)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "seed": (args.seed or 0) + number,
    }
    if args.top_p is not None:
        settings["top_p"] = args.top_p
    if args.logprobs:
        settings["logprobs"] = args.logprobs
    sampling = {"sampling_params": params(max_tokens=max_tokens, **settings)}
    if args.workflow in _SHORT and not _says_answers(args):
        num_short = args.short_tokens or min(max_tokens, DEFAULT_SHORT_TOKENS)
        short = params(max_tokens=num_short, **settings)
        sampling[_SHORT[args.workflow]] = short
    return sampling


def _says_answers(args: argparse.Namespace) -> bool:
    """Tell if what would be short is the answer, as verdicts are in the paper's debate."""
    is_papers = getattr(args, "layout", None) == "paper" and args.short_tokens is None
    return is_papers and args.workflow == "iterative_debate"


def _max_tokens(args: argparse.Namespace) -> int:
    is_made = args.workflow in SETS and args.data is None
    return _set(args).max_tokens if is_made else DEFAULT_MAX_TOKENS

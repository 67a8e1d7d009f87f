# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo calibrate`, and the way from recorded runs to a policy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import (
    DEFAULT_MAX_MODEL_LEN,
    LocalEngine,
    memory_for,
    start_engine,
    warm_up,
)
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import add_sampling, repair_of
from vllm_choreo.lab.cli.recorded import recorded_task
from vllm_choreo.lab.cli.run import make_folder
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.study.arguments import add_problems, add_target
from vllm_choreo.lab.study.sets import halved, sets_of
from vllm_choreo.lab.study.targets import MeasureTarget
from vllm_choreo.repair.policy import check_budget

if TYPE_CHECKING:
    from vllm import LLM

DEFAULT_RULES = (
    '{"reweight": [0.9, 1.0]}',
    "first:16",
    "first:64",
    '{"share": 0.2, "by": "random"}',
)
DEFAULT_BUDGETS = (0.05, 0.1, 0.2, 0.4)
DEFAULT_TARGET = "agreement=0.95"
TARGETS = ("kl=NATS per token", "agreement=SHARE of tokens", "ttft=SECONDS")


def command(parser: argparse.ArgumentParser) -> Main:
    """Measure what repair buys on your own runs, and write a policy that buys enough."""
    add = parser.add_argument
    add(
        "transcripts",
        type=Path,
        nargs="*",
        metavar="TRANSCRIPT",
        help="runs of one workflow: files of `vllm-choreo run`, or folders of it or of `record`",
    )
    add_problems(parser, "run first, as text")
    add_target(
        parser,
        DEFAULT_TARGET,
        "what is to be reached: kl=NATS per token to the text at most, agreement=SHARE of tokens "
        "at least, or ttft=SECONDS at most",
    )
    add(
        "--repair",
        action="append",
        metavar="RULE",
        help="a rule to compare with, again for more of them (default: "
        + ", ".join(DEFAULT_RULES).replace("%", "%%")
        + ")",
    )
    add(
        "--budget",
        type=float,
        action="append",
        metavar="SHARE",
        help="of a policy: how many of the reused tokens are encoded anew at most, again for more "
        f"of them (default: {', '.join(map(str, DEFAULT_BUDGETS))})",
    )
    add_model(parser)
    add_sampling(parser, None, "0, or 0.7 where calls ask the same")
    add_out(parser, "calibration", "folder for policy.json, the numbers and index.html")
    return main


def main(args: argparse.Namespace) -> int:
    """Calibrate; the exit status: 0, or 1 if only encoding everything reaches the target.

    Raises:
        ChoreoError: the arguments do not make sense, a run cannot be replayed, or the engine does
            not start.
    """
    from vllm_choreo.lab.study.calibrate.calibrating import calibrate
    from vllm_choreo.testing.models.embedded import model_folder

    target = MeasureTarget.given(args.target, TARGETS)
    rules = DEFAULT_RULES if args.repair is None else args.repair
    budgets = DEFAULT_BUDGETS if args.budget is None else args.budget
    memory = memory_for([repair_of(rule) for rule in rules])
    for budget in budgets:
        check_budget(budget)
    halves = halved(_tasks(args), "runs", "2 runs or more", "transcripts")
    make_folder(args.out)
    model = model_folder(args.model)
    llm = start_engine(model, args.max_model_len or DEFAULT_MAX_MODEL_LEN, True, **memory)
    warm_up(LocalEngine(llm), ("baseline", "choreo"))
    learnt, kept_back = (_run(llm, tasks, args.workflow) for tasks in halves)
    return calibrate(
        llm,
        learnt,
        kept_back,
        model,
        rules=rules,
        budgets=sorted(set(budgets)),
        target=target,
        out=args.out,
        seed=args.seed or 0,
    )


def _tasks(args: argparse.Namespace) -> list[Task]:
    """Tasks of one workflow; those of files have their recorded runs.

    Raises:
        ChoreoError: none, or of several workflows.
    """
    if bool(args.transcripts) == (args.workflow is not None):
        raise ChoreoError("what shall be calibrated? Give transcripts, or --workflow (and --data)")
    if args.workflow is not None:
        (one,) = sets_of(argparse.Namespace(**{**vars(args), "recorded": []}))
        tasks = list(one.tasks)
    else:
        files = [file for path in args.transcripts for file in _files(path)]
        tasks = [recorded_task(path) for path in files[: args.limit]]
    workflows = {task.recorded.workflow for task in tasks if task.recorded is not None}
    if len(workflows) > 1:
        raise ChoreoError(
            f"a policy is that of one workflow: these are runs of {', '.join(sorted(workflows))}",
            parameter="transcripts",
        )
    return tasks


def _files(path: Path) -> Sequence[Path]:
    """The transcripts of a folder, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted([*path.glob("transcript*.json"), *path.glob("*/[0-9]*.json")])


def _run(llm: LLM, tasks: Sequence[Task], workflow: str | None) -> list[Task]:
    """The tasks with recorded runs: those that have none are run as text."""
    if workflow is None:
        return list(tasks)
    from tqdm import tqdm

    engine, program = LocalEngine(llm), program_of(workflow)
    found = []
    for task in tqdm(tasks, desc=f"running {workflow} as text", unit="run", leave=False):
        with engine.open("baseline") as c:
            found.append(replace(task, recorded=program(c, **task.inputs)))
    return found

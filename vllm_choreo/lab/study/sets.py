# SPDX-License-Identifier: Apache-2.0
"""Problems of a study: those that recordings have kept back, or those of a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import OPTIONS
from vllm_choreo.lab.cli.recorded import recorded_task
from vllm_choreo.lab.cli.sets import SETS
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.cli.tasks import DEFAULT_TEMPERATURE, tasks_of

# Of a folder of `vllm-choreo record`: the runs that no training has seen.
HELD_OUT = "test"


@dataclass(frozen=True)
class HeldOutSet:
    """Problems on which a workflow is judged.

    Attributes:
        name: name for a reader.
        workflow: the name of its function.
        tasks: at least one.
    """

    name: str
    workflow: str
    tasks: tuple[Task, ...]


def sets_of(args: argparse.Namespace) -> list[HeldOutSet]:
    """The sets that a command line names.

    Raises:
        ChoreoError: none is named, one has no problems that were kept back, or a file cannot be
            read.
    """
    if bool(args.recorded) == (args.workflow is not None):
        raise ChoreoError(
            "what shall be judged? Give folders of `vllm-choreo record`, or --workflow (and --data)"
        )
    if args.recorded:
        for name in ("set", "data", "seed", "max_tokens", "short_tokens", "chat_template"):
            if getattr(args, name) is not None:
                raise ChoreoError(
                    f"a recording has its own problems: leave out --{name.replace('_', '-')}"
                )
        return [
            _recorded(folder, args.limit, args.temperature, args.top_p) for folder in args.recorded
        ]
    known = SETS.get(args.workflow, {})
    if args.set is not None and args.set not in known:
        raise ChoreoError(
            f"the sets of {args.workflow} are {', '.join(known) or 'none'}",
            parameter="set",
            value=args.set,
        )
    asked = dict.fromkeys(("replay", "server", "logprobs"))
    own = dict.fromkeys(OPTIONS.get(args.workflow, {}))  # `--restate` is an arm's, not the text's
    tasks = tasks_of(argparse.Namespace(**{**asked, **vars(args), **own}))
    return [HeldOutSet(tasks[0].source, args.workflow, tuple(tasks))]


def halved(
    tasks: Sequence[Task], things: str, needed: str, parameter: str
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Cut tasks in two halves: one to learn from, and one to check what it tells.

    Args:
        things, needed: words for the tasks, and how many are needed, for the error.
        parameter: the argument that gives too few.

    Raises:
        ChoreoError: there are not two of them.
    """
    if len(tasks) < 2:
        raise ChoreoError(
            f"one half of the {things} is kept back to check what the other half tells: give "
            f"{needed}",
            parameter=parameter,
            value=len(tasks),
        )
    return tuple(tasks[::2]), tuple(tasks[1::2])


def _recorded(
    folder: Path, limit: int | None, temperature: float | None, top_p: float | None
) -> HeldOutSet:
    files = sorted((folder / HELD_OUT).glob("*.json"))
    if not files:
        raise ChoreoError(
            f"{folder} has no runs in {HELD_OUT}/, which training has not seen: give a folder of "
            "`vllm-choreo record` that keeps some of them back",
            parameter="recorded",
            value=str(folder),
        )
    tasks = [recorded_task(path) for path in files[:limit]]
    workflow = _one_workflow(folder, {_workflow(task) for task in tasks})
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE.get(workflow, 0.0)
    drawn = tuple(replace(task, inputs=_sampled(task.inputs, temperature, top_p)) for task in tasks)
    return HeldOutSet(folder.resolve().name, workflow, drawn)


def _workflow(task: Task) -> str:
    assert task.recorded is not None
    return task.recorded.workflow


def _one_workflow(folder: Path, found: set[str]) -> str:
    if len(found) > 1:
        raise ChoreoError(
            f"{folder} has runs of {' and '.join(sorted(found))}: record each into a folder of its "
            "own",
            parameter="recorded",
            value=str(folder),
        )
    return found.pop()


def _sampled(inputs: Mapping[str, Any], temperature: float, top_p: float | None) -> dict[str, Any]:
    """The inputs with another temperature and top-p; what was recorded was drawn for training."""
    changed = {}
    for name, params in inputs.items():
        if name.endswith("_params") and params is not None:
            params = params.clone()
            params.temperature, params.logprobs = temperature, None
            params.top_p = params.top_p if top_p is None else top_p
        changed[name] = params
    return changed

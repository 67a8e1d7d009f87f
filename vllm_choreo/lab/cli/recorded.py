# SPDX-License-Identifier: Apache-2.0
"""Recorded runs, to be replayed: read from files, and refused where they do not make sense."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from vllm_choreo.cli.engine import LocalEngine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import OPTIONS, WORKFLOWS
from vllm_choreo.lab.cli.task import Task, check_may_be_judged, program_of, unreadable
from vllm_choreo.lab.problems import Kind, Problem
from vllm_choreo.transcript.check import check_form
from vllm_choreo.transcript.transcript import Transcript

# Forms of the inputs of all workflows, see `check_form`; sampling parameters end in "_params".
INPUTS: dict[str, Any] = {
    "question": str,
    "questions": list[str],
    "documents": list[str],
    "opening": str,
    "concepts": list[str],
    "requests": list[str],
    "scenario": dict[str, Any],
    "candidates": int,
    "voters": int | list[str],
    "agents": int | list[str],
    "rounds": int,
    "restate": bool,
    "pasted": bool,
    "shuffled": bool,
    "variant": str,
    "strategies": list[str],
    "leak": str,
    "layout": str,
    "first": str,
    "predict": bool,
    "plans": list[list[int]],
    "turns": dict[str, str],
}


class _Problem(Struct):
    id: str
    question: str
    answers: list[str]
    kind: str
    documents: list[str]
    opening: str = ""


class _Task(Struct):
    id: str
    source: str
    problems: list[_Problem]


def recorded_tasks(args: argparse.Namespace) -> list[Task]:
    """The runs of the files that `--replay` names.

    Raises:
        ChoreoError: a file cannot be read, is no transcript, or does not suit the workflow; or
            there are arguments that a replay takes from its transcript.
    """
    own, more = OPTIONS.get(args.workflow, {}), ("chat_template", "top_p")
    for name in ("data", "limit", "seed", "max_tokens", "short_tokens", "temperature", *more, *own):
        if getattr(args, name, None) is not None:
            raise ChoreoError(
                f"the inputs of a replay are those of its transcript: leave out "
                f"--{name.replace('_', '-')}"
            )
    tasks = [recorded_task(path) for path in args.replay]
    for task, path in zip(tasks, args.replay, strict=True):
        assert task.recorded is not None
        if task.recorded.workflow != args.workflow:
            found = task.recorded.workflow
            raise ChoreoError(f"{path} is a transcript of {found}, not of {args.workflow}")
    return tasks


def recorded_task(path: Path) -> Task:
    """The run of a file.

    Raises:
        ChoreoError: it cannot be read, is no transcript of `vllm-choreo run`, or may not be judged.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        transcript = Transcript.from_json(data)
        if transcript.workflow not in WORKFLOWS:
            raise ChoreoError(
                f"{path} is of a workflow that is not known; the workflows are "
                f"{', '.join(WORKFLOWS)}",
                parameter="workflow",
                value=transcript.workflow,
            )
        return _task(data, transcript, path)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ChoreoError):
            raise
        raise ChoreoError(f"{path} is no transcript of `vllm-choreo run`: {error}") from error


def _task(data: dict[str, Any], transcript: Transcript, path: Path) -> Task:
    """The task that a transcript is of; without problems if it was saved by another program."""
    about = data.get("task", {"id": path.stem, "source": path.name, "problems": []})
    check_form(about, _Task, "task")
    inputs = {name: _argument(name, value) for name, value in transcript.inputs.items()}
    try:
        inspect.signature(program_of(transcript.workflow)).bind(None, **inputs)
    except TypeError as error:
        found = f"{path} has other inputs than {transcript.workflow} takes ({error})"
        raise ChoreoError(found) from error
    problems = tuple(_problem(f, f"task.problems[{i}]") for i, f in enumerate(about["problems"]))
    check_may_be_judged(problems)
    return Task(about["id"], about["source"], inputs, problems, transcript)


def _argument(name: str, value: object) -> object:
    """An input of the workflow, read from plain data.

    Raises:
        ValueError: the value is of another type than the workflow takes.
    """
    place = f"inputs.{name}"
    if not name.endswith("_params"):
        if name in INPUTS:
            check_form(value, INPUTS[name], place)
        return value
    if value is None:
        return None
    check_form(value, dict[str, Any], place)
    assert isinstance(value, dict)
    try:
        return LocalEngine.sampling(**value)
    except Exception as error:  # the checks of vLLM, msgspec and Python have no common base
        raise ValueError(f"{place} are no sampling parameters: {error}") from error


def _problem(fields: dict[str, Any], place: str) -> Problem:
    if fields["kind"] not in get_args(Kind):
        raise ValueError(f"{place}.kind must be one of {get_args(Kind)}, not {fields['kind']!r}")
    if fields["kind"] in ("code", "calls") and len(fields["answers"]) != 2:
        raise ValueError(f"{place}.answers must be two, not {len(fields['answers'])}")
    lists = {name: tuple(fields[name]) for name in ("answers", "documents")}
    return Problem(**{**fields, **lists})

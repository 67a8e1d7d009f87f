# SPDX-License-Identifier: Apache-2.0
"""Records tasks, trains adapters of every placement on each, and judges all on all.

    python -m benchmarks.training WORK [--model MODEL] [--tasks key_values reports]

A task is judged with its own adapters, and with those of other tasks that have some placement.
Whatever is in the folder WORK already is not made again, so that it can be done in parts. What is
judged anew takes the place of its rows in the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import model_name, picture_name
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text, only
from benchmarks.training.picture import draw
from benchmarks.training.stages import TASKS, Stages, merged
from benchmarks.training.tables import TABLES
from vllm_choreo.trained_adapter import PLACEMENTS, current_placement

NAME = "training"
_MIXED = "prefill"  # of the mixture, and of two epochs


def main() -> int:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    stages, model = Stages(args.work, args.model), model_name(args.model)
    alone = dict(name.split(":") for name in args.alone)
    judged = [*(args.judged or args.tasks), *alone]
    recorded = {task: stages.record(task) for task in dict.fromkeys([*args.tasks, *judged])}
    adapters = _adapters(args, stages, recorded)
    twice = {task: stages.train(recorded[task], _MIXED, 2) for task in args.longer}
    own = {task: [stages.train(recorded[task], alone[task])] for task in alone}
    controls = {task: stages.control(recorded[task]) for task in args.controls}
    for task in judged:
        if not TASKS[task].shares[-1]:
            continue  # nothing is kept back
        worn = own.get(task) or [p for p in adapters if _is_tried(p.name, task, args.transferred)]
        rows = stages.evaluate(recorded[task], worn)
        if task in twice:
            rows += stages.evaluate(recorded[task], [twice[task]])
        if task in controls:
            rows += stages.evaluate(recorded[task], [], [controls[task]])
        told = [
            {"model": model, **row, "minutes": _minutes(stages, row["arm"]), **record()}
            for row in rows
        ]
        write_csv(NAME, merged(read_csv(NAME), told))
    draw(only(model=model)(read_csv(NAME)), picture_name(NAME, args.model))
    print(as_text([TABLES[NAME]]))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder for recordings, adapters, evaluations")
    parser.add_argument("--model", help="folder or name (default: the small test model)")
    names = [*TASKS]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names[:3], metavar="NAME")
    parser.add_argument("--judged", nargs="+", choices=names, metavar="NAME", help="default: tasks")
    placements: dict[str, Any] = {"type": current_placement, "choices": PLACEMENTS}
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), **placements)
    parser.add_argument(
        "--transferred",
        nargs="*",
        **placements,
        default=["prefill"],
        help="placements of adapters that are tried on other tasks than their own, too",
    )
    several: dict[str, Any] = {"nargs": "+", "choices": names, "default": [], "metavar": "NAME"}
    parser.add_argument("--mixture", **several, help="tasks of one more adapter, for all of them")
    parser.add_argument("--longer", **several, help="tasks of a prefill adapter of two epochs, too")
    parser.add_argument(
        "--alone",
        nargs="+",
        type=_task_and_placement,
        choices=[f"{name}:{placement}" for name in names for placement in PLACEMENTS],
        default=[],
        metavar="NAME:PLACEMENT",
        help="tasks with one adapter, and no transfer",
    )
    parser.add_argument(
        "--controls", **several, help="tasks that one direct call is trained to answer as the text"
    )
    return parser.parse_args()


def _task_and_placement(given: str) -> str:
    task, _, placement = given.partition(":")
    return f"{task}:{current_placement(placement)}"


def _adapters(args: argparse.Namespace, stages: Stages, recorded: Mapping[str, Path]) -> list[Path]:
    """Of tasks in all placements, and of the mixture."""
    adapters = [
        stages.train(recorded[task], placement)
        for task in args.tasks
        for placement in args.placements
    ]
    if args.mixture:
        adapters.append(stages.train(stages.mixture(args.mixture), _MIXED))
    return adapters


def _minutes(stages: Stages, arm: str) -> float | str:
    """That an arm's adapter was trained; empty if it has none."""
    seconds = stages.seconds(arm.rpartition(" ")[2])
    return "" if seconds is None else round(seconds / 60, 1)


def _is_tried(adapter: str, task: str, transferred: Sequence[str]) -> bool:
    own, _, placement = adapter.rpartition("-")
    return own == task or placement in transferred


if __name__ == "__main__":
    sys.exit(main())

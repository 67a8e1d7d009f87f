# SPDX-License-Identifier: Apache-2.0
"""Records tasks, trains adapters of every placement on each, and judges all on all.

    python -m benchmarks.training WORK [--tasks key_values reports] [--placements writer]

On 2 cores a task took 9 to 16 minutes to record and 9 to 20 for an adapter, two at a time. Whatever
is in the folder WORK already is not made again, so that it can be done in parts. Tasks that are
judged anew take the place of their rows in the results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.training import stages
from benchmarks.training.page import NAME, section
from vllm_choreo.trained_adapter import PLACEMENTS

_MIXTURE_PLACEMENT = "writer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder for recordings, adapters, evaluations")
    names = [*stages.TASKS]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names[:3], metavar="NAME")
    parser.add_argument("--judged", nargs="+", choices=names, metavar="NAME", help="default: tasks")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--problems", type=int, default=660, help="of a task; a third is kept back")
    parser.add_argument("--mixture", action="store_true", help="one more adapter, for all tasks")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    judged = args.judged or args.tasks
    recorded = {
        task: stages.record(args.work, task, args.problems)
        for task in dict.fromkeys([*args.tasks, *judged])
    }
    adapters = [
        stages.train(args.work, recorded[task], placement)
        for task in args.tasks
        for placement in args.placements
    ]
    if args.mixture:
        mixture = stages.mixture(args.work, args.tasks)
        adapters.append(stages.train(args.work, mixture, _MIXTURE_PLACEMENT))
    minutes = {path.name: round(stages.seconds(path) / 60, 1) for path in adapters}
    for task in judged:
        rows = stages.evaluate(args.work, recorded[task], adapters)
        told = [{**row, "minutes": minutes.get(row["arm"], ""), **record()} for row in rows]
        write_csv(NAME, stages.merged(read_csv(NAME), told))
    print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main())

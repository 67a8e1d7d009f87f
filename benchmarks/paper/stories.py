# SPDX-License-Identifier: Apache-2.0
"""Which of two runs' stories a judge prefers, and which hold the words they were asked for.

    vllm-choreo run branch_solve_merge --mode both --out RUNS …
    vllm-choreo judge RUNS --judge URL --judge-model NAME --out JUDGED
    python -m benchmarks.paper.stories RUNS JUDGED

A row for each pair of stories. Rows of other judges stay, as do those of one that is offered ties
and one that is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import read_numbers, record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.paper.tables import STORIES, TABLES
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.judge.command import RESULT, pairs_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="folder of `vllm-choreo run --mode both`")
    parser.add_argument("judged", type=Path, help="folder of `vllm-choreo judge`")
    args = parser.parse_args()
    judged = read_numbers(args.judged / RESULT, "vllm-choreo judge", "judge", "may_tie", "pairs")
    names, pairs = pairs_of([args.runs])
    about = {"judge": judged["judge"], "may_tie": str(judged["may_tie"])}
    where = record()
    rows = [{**about, **row, **where} for row in stories_of(names, pairs, judged)]
    write_csv(STORIES, [*rows_of_others(STORIES, **about), *rows])
    print(as_text([TABLES[STORIES]]))
    return 0


def stories_of(
    names: tuple[str, str], pairs: Sequence[tuple[Task, Task]], judged: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows of pairs of stories: coverage of their words, from 0 to 1, who has won, and the margin.

    The margin is in log-odds, above 0 where the choreographed story is likelier; see `Comparison`.

    Args:
        names: of the runs, in the order of each pair; the table's are "choreo" and "baseline".
        judged: the content of `judged.json`.
    """
    verdicts = {row["id"]: row for row in judged["pairs"]}
    for pair in pairs:
        verdict = verdicts[pair[0].id]
        row = {"id": pair[0].id, "is_torn": int(verdict["is_torn"]), "margin": verdict["margin"]}
        winner = {1: names[0], 2: names[1]}.get(verdict["winner"], "tie")
        for name, task in zip(names, pair, strict=True):
            assert task.recorded is not None
            row[f"coverage_{name}"] = task.coverage(task.recorded.answers)
        if row["margin"] is not None and names[0] != "choreo":
            row["margin"] = -row["margin"]
        yield {**row, "winner": winner}


if __name__ == "__main__":
    sys.exit(main())

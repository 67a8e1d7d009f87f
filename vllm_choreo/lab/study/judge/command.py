# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo judge`, its pairs of runs, and its table."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_choreo.cli.arguments import add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError
from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.recorded import recorded_task
from vllm_choreo.lab.cli.report import aligned
from vllm_choreo.lab.cli.run import make_folder
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.workflows.direct import question_of

RESULT = "judged.json"

_SECONDS = 600.0


def command(parser: argparse.ArgumentParser) -> Main:
    """Ask a judge model which of two runs answers better, with either answer first."""
    add = parser.add_argument
    add(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUNS",
        help="folder of `vllm-choreo run --mode both`; or two folders of runs on the same problems",
    )
    add("--judge", required=True, metavar="URL", help="address of an OpenAI API")
    add("--judge-model", required=True, metavar="NAME", help="name of the model there")
    add("--api-key", metavar="KEY", help="of the judge (default: OPENAI_API_KEY)")
    add("--no-tie", action="store_true", help='do not offer the judge to say "tie"')
    add_out(parser, "judged", "folder for judged.json")
    return main


def main(args: argparse.Namespace) -> int:
    """Judge; the exit status, 0.

    Raises:
        ChoreoError: the folders hold no runs on the same problems, or the judge does not answer.
    """
    from tqdm import tqdm

    from vllm_choreo.client.endpoint import Endpoint
    from vllm_choreo.lab.study.judge.asking import Judge

    names, pairs = pairs_of(args.runs)
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    judge = Judge(Endpoint(args.judge, api_key, _SECONDS), args.judge_model, not args.no_tie)
    make_folder(args.out)
    rows = []
    for first, second in tqdm(pairs, unit="pair", leave=False):
        texts = ["\n\n".join(_answers(task)) for task in (first, second)]
        found = judge.compare(question_of(_workflow(first), first.inputs), *texts)
        rows.append(
            {"id": first.id, "winner": found.winner, "is_torn": found.is_torn, **asdict(found)}
        )
    about = {"runs": names, "judge": args.judge_model, "may_tie": judge.may_tie}
    result = {**about, "pairs": rows, **win_rates(rows)}
    write_text(args.out / RESULT, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    print(_table(names, result))
    return 0


def pairs_of(folders: Sequence[Path]) -> tuple[tuple[str, str], list[tuple[Task, Task]]]:
    """The names of two runs, and their tasks in pairs, by their problems.

    Raises:
        ChoreoError: there are not two runs, or not on the same problems.
    """
    if len(folders) > 2:
        raise ChoreoError("two folders are compared at most", parameter="runs", value=len(folders))
    found: dict[str, dict[str, Task]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            task = recorded_task(path)
            assert task.recorded is not None
            mode = task.recorded.mode
            name = mode if len(folders) == 1 else f"{folder}, {mode}"
            found.setdefault(name, {})[task.id] = task
    if len(found) != 2:
        raise ChoreoError(
            "the transcripts of two runs are needed: give a folder of `vllm-choreo run --mode "
            "both`, or two folders, each of one mode",
            parameter="runs",
            value=", ".join(found) or [str(folder) for folder in folders],
        )
    one, two = found.values()
    shared = [name for name in one if name in two]
    if not shared or any(one[name].problems != two[name].problems for name in shared):
        raise ChoreoError(
            "the runs are on other problems: give runs with the same data and seed",
            parameter="runs",
            value=[str(folder) for folder in folders],
        )
    first, second = found
    return (first, second), [(one[name], two[name]) for name in shared]


def win_rates(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Shares of pairs that either run wins, and of ties: each with its 95% bootstrap interval.

    `first_preferred` is the share of those with log-probabilities in which the first is likelier;
    a pair in which neither is counts half.
    """
    from vllm_choreo.lab.study.stats import bootstrap_interval

    shares = {
        name: [float(row["winner"] == winner) for row in rows]
        for name, winner in (("first_wins", 1), ("second_wins", 2), ("ties", 0))
    }
    margins = [row["margin"] for row in rows if row.get("margin") is not None]
    if margins:
        shares["first_preferred"] = [preferred(margin) for margin in margins]
    return {
        name: [fmean(values), *bootstrap_interval(values, fmean)] for name, values in shares.items()
    }


def preferred(margin: float) -> float:
    """Share that the first answer has in a pair with this margin, see `Comparison`: 0, 0.5 or 1."""
    return 0.5 if margin == 0 else float(margin > 0)


def _workflow(task: Task) -> str:
    assert task.recorded is not None
    return task.recorded.workflow


def _answers(task: Task) -> Sequence[str]:
    assert task.recorded is not None
    return task.recorded.answers


def _table(names: tuple[str, str], result: dict[str, Any]) -> str:
    lines = [("", "%", "95 %")]
    labels = {
        "first_wins": f"{names[0]} wins",
        "second_wins": f"{names[1]} wins",
        "ties": "ties",
        "first_preferred": f"{names[0]} is likelier",
    }
    for name, label in labels.items():
        if name not in result:
            continue
        rate, low, high = (100 * value for value in result[name])
        lines.append((label, f"{rate:.1f}", f"{low:.1f} to {high:.1f}"))
    torn = sum(row["is_torn"] for row in result["pairs"])
    head = f"{len(result['pairs'])} pairs, judged by {result['judge']}"
    head += f"; in {torn} of them the same place was preferred both times"
    return f"{head}\n\n{aligned(lines, num_names=1)}"

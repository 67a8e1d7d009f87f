# SPDX-License-Identifier: Apache-2.0
"""Results of `vllm-choreo evaluate`: the numbers as JSON and CSV, a page, a table.

`evaluation.json` holds everything: the page is drawn from it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.report import question_of
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.report.evaluation import evaluation_html
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.results import scores_table, write_results
from vllm_choreo.lab.study.scores import Judged, rows_of
from vllm_choreo.lab.study.sets import HeldOutSet

FORMAT = 1  # of evaluation.json


@dataclass
class JudgedSet:
    """Results of arms on a set of problems.

    Attributes:
        set, arms: problems to run, and arms that run them.
        problems: problems that all arms have run, with the judgement of each arm by name.
    """

    set: HeldOutSet
    arms: Sequence[Arm]
    problems: list[tuple[Task, dict[str, Judged]]] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """One row per arm: see `rows_of`; with the placement of its adapter."""
        found = {arm.name: [judged[arm.name] for _, judged in self.problems] for arm in self.arms}
        placements = {arm.name: arm.placement for arm in self.arms}
        return [{**row, "placement": placements[row["arm"]]} for row in rows_of(found)]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.set.name,
            "workflow": self.set.workflow,
            "rows": self.rows(),
            "problems": [_problem_json(task, judged) for task, judged in self.problems],
        }


def save(judged: Sequence[JudgedSet], facts: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Write `evaluation.json`, `evaluation.csv` and `index.html`; return what the first holds.

    Args:
        judged: at least one set, each with a problem.
        facts: facts about the engine, by name.
        out: an existing folder.
    """
    evaluation = {
        "format": FORMAT,
        "facts": dict(facts),
        "adapters": _adapters_json(judged),
        "sets": [one.to_json() for one in judged],
    }
    write_text(out / "evaluation.csv", _csv(evaluation))
    write_results(out, "evaluation.json", evaluation, evaluation_html(evaluation))
    return evaluation


def table(evaluation: Mapping[str, Any]) -> str:
    """One line per set and arm."""
    names = {"arm": "arm", "used by": "placement"}
    columns = "right,difference,p,same,KL,gap,KL gap,encoded,TTFT".split(",")
    return scores_table(evaluation["sets"], names, columns)


def _problem_json(task: Task, judged: Mapping[str, Judged]) -> dict[str, Any]:
    return {
        "id": task.id,
        "question": question_of(task, task.inputs),
        "expected": task.expected(),
        "arms": {name: asdict(found) for name, found in judged.items()},
    }


def _adapters_json(judged: Sequence[JudgedSet]) -> list[dict[str, Any]]:
    """Adapters of the arms, with training's record of each."""
    arms = {arm.name: arm for one in judged for arm in one.arms if arm.adapter is not None}
    return [
        {"arm": name, "placement": arm.placement, **(asdict(arm.trained) if arm.trained else {})}
        for name, arm in arms.items()
    ]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose values by role are JSON text."""
    return {
        key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()
    }


def _csv(evaluation: Mapping[str, Any]) -> str:
    rows = [
        {"set": one["name"], "workflow": one["workflow"], **_flat(row)}
        for one in evaluation["sets"]
        for row in one["rows"]
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

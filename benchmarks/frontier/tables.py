# SPDX-License-Identifier: Apache-2.0
"""The tables of the frontier: rules against `first:k`, and distances at one budget."""

from __future__ import annotations

from typing import Any

from benchmarks.frontier.points import against_first, points_of
from benchmarks.frontier.rules import ALL, FIRST, NONE
from benchmarks.harness.tables import Rows, Table, mean, of, only


def _compared(rows: Rows) -> Rows:
    """A row for each model, task, rule and budget: -1 better than `first:k`, 1 worse, 0 neither."""
    found: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for task, points in points_of(only(model=model)(rows)).items():
            for rule, budget in points:
                if rule in (NONE, ALL, FIRST):
                    continue
                _, low, high = against_first(points, (rule, budget))
                sign = (low > 0) - (high < 0)
                found.append({"model": model, "rule": rule, "task": task, "sign": sign})
    return found


def _number(sign: int) -> Any:
    return lambda rows: sum(row["sign"] == sign for row in rows)


def _better_on(rows: Rows) -> str:
    return ", ".join(dict.fromkeys(r["task"] for r in rows if r["sign"] < 0)) or "nowhere"


def _ends_and_first(rows: Rows) -> Rows:
    """Rows of no repair and of `first:k`."""
    return [row for row in rows if row["rule"] in (NONE, FIRST)]


TASKS = ("look-up", "two hops", "variable chains", "word counts", "votes")
TABLES = {
    "frontier": Table(
        "frontier",
        {"model": "model", "rule": "rule"},
        {
            "better than first": _number(-1),
            "worse": _number(1),
            "of": len,
            "better on": _better_on,
        },
        rows=_compared,
    ),
    "frontier_first": Table(
        "frontier",
        {"model": "model", "rule": "rule", "budget": "budget"},
        {f"KL, {task}": mean(of("kl", task=task), ".4f") for task in TASKS},
        rows=_ends_and_first,
    ),
}

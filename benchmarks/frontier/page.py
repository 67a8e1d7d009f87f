# SPDX-License-Identifier: Apache-2.0
"""The section on the frontier of repair, and its picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.frontier.rules import ALL, FIRST, NONE
from benchmarks.harness.pictures import BLUE, GREEN, INK, ORANGE, PALE, RED, panels, save_picture
from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table
from vllm_choreo.judge.stats import bootstrap_interval

PICTURE = "frontier"
_COLOURS = {
    "first": BLUE,
    "last": PALE,
    "random": INK,
    "attention": RED,
    "keys": ORANGE,
    "first layers": GREEN,
    "middle layers": "#8a5fbf",
}
Rows = Sequence[Mapping[str, str]]


class Point(NamedTuple):
    """A rule at a budget on a task, of each problem.

    Attributes:
        charged: share of the tokens that are read where they were not encoded.
        kl: KL(text || rule), in nats per token.
        same, right: 1 where all likeliest tokens are the text's; where the answer is right. `right`
            is empty where none is known.
    """

    charged: list[float]
    kl: list[float]
    same: list[int]
    right: list[int]


Points = dict[tuple[str, float], Point]


def points_of(rows: Rows) -> dict[str, Points]:
    """By task, then by rule and budget."""
    found: dict[str, Points] = defaultdict(dict)
    for row in rows:
        key = row["rule"], float(row["budget"])
        point = found[row["task"]].setdefault(key, Point([], [], [], []))
        point.charged.append(float(row["charged"]))
        point.kl.append(float(row["kl"]))
        point.same.append(int(row["same"]))
        point.right.extend([int(row["right"])] if row["right"] else [])
    return dict(found)


def against_first(points: Points, key: tuple[str, float]) -> tuple[float, float, float]:
    """KL less that of `first` at the same charge, of the same problems: mean, and its interval.

    What `first` has between its budgets is interpolated; no repair is its smallest one, all its
    largest.
    """
    ends = [(NONE, 0.0), *sorted(k for k in points if k[0] == FIRST), (ALL, 1.0)]
    less = []
    for number, (charged, kl) in enumerate(zip(points[key].charged, points[key].kl, strict=True)):
        places = [points[end].charged[number] for end in ends]
        values = [points[end].kl[number] for end in ends]
        less.append(kl - float(np.interp(charged, places, values)))
    return fmean(less), *bootstrap_interval(less, fmean, resamples=2000)


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv("frontier")
    if not rows:
        return ""
    tasks = points_of(rows)
    draw(tasks)
    parts = [
        "## What repair buys",
        "Readers of four documents (votes: of five candidates of up to 96 tokens) "
        "that were encoded behind the instruction alone, under every rule and budget. *KL*: from "
        "what the text says, over the whole vocabulary, at each token of the text's answer, nats; "
        "mean of the problems and its 95% bootstrap interval. *Charged*: what is run through the "
        "model, choosing included, by the tokens that are read where they were not encoded. "
        "*Same*: answers all of whose likeliest tokens are the text's. *Less than first*: "
        "difference of the KL from that of `first:k` at the same charge, of the same problems; "
        "**bold**: its interval leaves out 0. *APE*: the rule `reweight`. *keys*: blocks whose "
        "keys in layer 1 change most, a rule that the engine has no longer.",
        f"![Charged tokens against KL](results/{PICTURE}.png)",
    ]
    for task, points in tasks.items():
        parts += [f"### {task}", _table(points)]
    return "\n\n".join([*parts, _verdict(tasks), machine_line(rows)])


def _table(points: Points) -> str:
    order = list(dict.fromkeys(rule for rule, _ in points))
    lines = []
    for key in sorted(points, key=lambda k: (order.index(k[0]), k[1])):
        point = points[key]
        low, high = bootstrap_interval(point.kl, fmean, resamples=2000)
        name = key[0] if key[1] in (0.0, 1.0) else f"{key[0]} {key[1]:.0%}"
        lines.append(
            [
                name,
                f"{fmean(point.charged):.1%}",
                f"{fmean(point.kl):.4f} [{low:.4f}, {high:.4f}]",
                "" if key[0] in (NONE, ALL, FIRST) else _difference(points, key),
                f"{sum(point.same)} of {len(point.same)}",
                f"{sum(point.right)} of {len(point.right)}" if point.right else "",
            ]
        )
    return table(["rule", "charged", "KL", "less than first", "same", "right"], lines)


def _difference(points: Points, key: tuple[str, float]) -> str:
    mean, low, high = against_first(points, key)
    text = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _verdict(tasks: Mapping[str, Points]) -> str:
    """Where each rule beats `first:k`, and where it loses to it."""
    lines: list[list[Any]] = []
    rules = dict.fromkeys(r for points in tasks.values() for r, _ in points)
    for rule in rules:
        if rule in (NONE, ALL, FIRST):
            continue
        found = [
            (task, against_first(points, key))
            for task, points in tasks.items()
            for key in points
            if key[0] == rule
        ]
        better = [task for task, (_, _, high) in found if high < 0]
        worse = [task for task, (_, low, _) in found if low > 0]
        where = ", ".join(dict.fromkeys(better)) or "nowhere"
        lines.append([rule, len(better), len(worse), len(found), where])
    head = ["rule", "better than first", "worse", "of", "better on"]
    return "### Against `first:k`\n\n" + table(head, lines)


def draw(tasks: Mapping[str, Points]) -> None:
    """Charge against KL, one panel per task."""
    figure, all_axes = panels(list(tasks))
    for axes, points in zip(all_axes, tasks.values(), strict=True):
        none = fmean(points[NONE, 0.0].kl)
        for rule, colour in _COLOURS.items():
            at = sorted(key for key in points if key[0] == rule)
            x = [0.0, *(100 * fmean(points[key].charged) for key in at)]
            y = [none, *(fmean(points[key].kl) for key in at)]
            axes.plot(x, y, marker="o", ms=3, lw=1.4, color=colour, label=rule)
        for (rule, _), point in points.items():
            if rule.startswith("APE"):
                axes.plot([0], [fmean(point.kl)], marker="x", ms=5, color=PALE)
        axes.set_xlabel("charged, % of the tokens read elsewhere", fontsize=9, color=INK)
        axes.set_ylim(bottom=0)
    all_axes[0].set_ylabel("KL to the text, nats per token", fontsize=9, color=INK)
    all_axes[0].legend(fontsize=8, frameon=False)
    save_picture(figure, PICTURE)

# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of an evaluation: accuracies, distances, transfer, curves, examples.

It has no scripts: it is drawn when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_choreo.lab.report.frontier import HEIGHT, WIDTH, Frontier, Point, frontier
from vllm_choreo.lab.report.markup import (
    filled,
    hundredths,
    interval,
    milliseconds,
    nats,
    percent,
    signed,
    whole,
)

Row = Mapping[str, Any]


def evaluation_html(evaluation: Mapping[str, Any]) -> str:
    """Draw the page.

    Args:
        evaluation: content of evaluation.json.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    sets = evaluation["sets"]
    values = {
        "facts": evaluation["facts"],
        "head": _HEAD,
        "sets": [{**one, **_drawn(one)} for one in sets],
        "transfer": _transfer(sets),
        "curves": [
            _curve(one) for one in evaluation["adapters"] if any(one.get("curves", {}).values())
        ],
        "share": _share,
    }
    return filled("evaluation.html", values)


# -- one set -------------------------------------------------------------------------------------

_HEAD = (
    *("arm", "calls with the adapter", "right", "accuracy, %", "difference from text, points"),
    *("worse / better", "p", "same answers, %", "KL to text, nats per token"),
    *("gap closed, %", "KL gap closed, %", "coverage, %", "same calls", "tokens encoded", "TTFT"),
)


def _drawn(one: Mapping[str, Any]) -> dict[str, object]:
    """Values that the template draws a set from, besides its own."""
    rows = one["rows"]
    return {
        "cells": map(_cells, rows),
        "longest": max([row["kl_high"] or 0 for row in rows], default=0) or 1,
        "frontier": _frontier(rows),
        "differing": _differing(one["problems"]),
    }


def _cells(row: Row) -> list[str]:
    judged = row["judged"]
    return [
        *(row["arm"], row["placement"] or "–", f"{row['right']} of {judged}" if judged else "–"),
        *(interval(row, "accuracy", hundredths), interval(row, "difference", signed)),
        f"{row['worse']} / {row['better']}" if judged else "–",
        f"{row['p_value']:.3f}" if judged else "–",
        *(hundredths(row["same"]), interval(row, "kl"), hundredths(row["gap_closed"])),
        *(interval(row, name, hundredths) for name in ("kl_gap_closed", "coverage")),
        *(_same_calls(row), whole(row["encoded"]), milliseconds(row["ttft"])),
    ]


def _same_calls(row: Row) -> str:
    compared = row["compared_calls"]
    shown = (f"{role} {row['same_calls'][role]} of {num}".strip() for role, num in compared.items())
    return ", ".join(shown) or "–"


def _frontier(rows: Sequence[Row]) -> Frontier:
    """Picture of the distance to the text, else of the accuracy, by tokens encoded."""
    name = "kl" if any(row["kl"] is not None for row in rows) else "accuracy"
    points = [
        Point(row["arm"], row["encoded"], row[name], row[f"{name}_low"], row[f"{name}_high"], i)
        for i, row in enumerate(rows)
        if row[name] is not None
    ]
    axis = "KL to the text, nats per token" if name == "kl" else "accuracy"
    show = nats if name == "kl" else percent
    return frontier(points, axis, "tokens encoded per problem", show)


def _share(value: float, longest: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / longest)):.2f}%"


def _differing(problems: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Problems on which arms answer differently; those that some get right, some wrong, first."""
    differing = [
        problem
        for problem in problems
        if len({tuple(found["answers"]) for found in problem["arms"].values()}) > 1
    ]
    differing.sort(key=lambda p: len({found["is_right"] for found in p["arms"].values()}) < 2)
    marks = {True: "right", False: "wrong", None: ""}
    return [
        {
            **problem,
            "cells": [
                (name, marks[found["is_right"]], "\n\n".join(found["answers"]))
                for name, found in problem["arms"].items()
            ],
        }
        for problem in differing
    ]


# -- all sets ------------------------------------------------------------------------------------


def _transfer(sets: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the share that each adapter regains on each set."""
    arms = dict.fromkeys(
        row["arm"] for one in sets for row in one["rows"] if row["kl_gap_closed"] is not None
        or row["gap_closed"] is not None
    )  # fmt: skip
    found = {(one["name"], row["arm"]): row for one in sets for row in one["rows"]}
    return [[arm, *(_regained(found.get((one["name"], arm))) for one in sets)] for arm in arms]


def _regained(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{percent(row['gap_closed'])} / {percent(row['kl_gap_closed'])}"


def _curve(adapter: Mapping[str, Any]) -> dict[str, object]:
    """Losses of a training as lines from the first step to the last."""
    curves = {name: points for name, points in adapter["curves"].items() if points}
    last = max(point[0] for points in curves.values() for point in points) or 1
    most = max(point[1] for points in curves.values() for point in points) or 1
    return {
        "arm": adapter["arm"],
        "placement": adapter["placement"],
        "scale": f"{most:.3f} nats per token at the top, {last:g} steps to the right",
        "lines": {name: _points(points, last, most) for name, points in curves.items()},
    }


def _points(points: Sequence[Sequence[float]], last: float, most: float) -> str:
    return " ".join(
        f"{WIDTH * step / last:.1f},{HEIGHT * (1 - loss / most):.1f}" for step, loss in points
    )

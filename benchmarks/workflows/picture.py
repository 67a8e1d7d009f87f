# SPDX-License-Identifier: Apache-2.0
"""The picture of the workflows: gain end to end against the tokens that a run generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, INK, PALE, panels, save_picture
from benchmarks.harness.stats import median

Rows = Sequence[Mapping[str, Any]]


def points(rows: Rows, workflow: str) -> list[tuple[int, float]]:
    """(tokens generated, baseline / choreographed seconds) of each question, over all passes."""
    found = []
    mine = [row for row in rows if row["workflow"] == workflow]
    for question in dict.fromkeys(row["question"] for row in mine):
        runs = [row for row in mine if row["question"] == question]
        seconds = {
            side: [float(row["seconds"]) for row in runs if row["side"] == side]
            for side in ("baseline", "choreo")
        }
        pairs = zip(seconds["baseline"], seconds["choreo"], strict=True)
        found.append((int(runs[0]["generated_tokens"]), median(a / b for a, b in pairs)))
    return sorted(found)


def draw(rows: Rows, name: str) -> None:
    """Draw a point a question, for each workflow.

    Args:
        name: name of the picture's file, without its ending.
    """
    workflows = list(dict.fromkeys(row["workflow"] for row in rows))
    found = {workflow: points(rows, workflow) for workflow in workflows}
    figure, all_axes = panels(workflows)
    for axes, places in zip(all_axes, found.values(), strict=True):
        axes.axhline(1, color=PALE, lw=1)
        axes.plot(*zip(*places, strict=True), "o", color=BLUE, ms=5)
        axes.set_xlabel("tokens generated", color=INK)
        axes.set_ylabel("end to end, baseline / choreographed", color=INK)
    save_picture(figure, name)

# SPDX-License-Identifier: Apache-2.0
"""The picture of the games: how much Bob's cooperation changes with what utterances carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.pictures import BLUE, GREEN, INK, ORANGE, PALE, panels, save_picture
from benchmarks.paper.tables import DILEMMA, shift
from vllm_choreo.lab.study.stats import bootstrap_interval
from vllm_choreo.lab.workflows.prisoners_dilemma import LEAKS

_COLOURS = dict(zip(LEAKS, (INK, BLUE, ORANGE, GREEN), strict=True))


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar with its interval for each strategy of Alice's and each leak."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    figure, (axes,) = panels(["Bob cooperates, choreographed less as text, points"])
    axes.axhline(0, color=PALE, lw=1)
    width = 0.8 / len(LEAKS)
    for number, leak in enumerate(LEAKS):
        for place, strategy in enumerate(strategies):
            found = shift([row for row in rows if row["strategy"] == strategy], leak)
            low, high = bootstrap_interval(found, fmean)
            middle = fmean(found)
            axes.bar(
                place + (number - 1.5) * width,
                middle,
                width,
                yerr=[[middle - low], [high - middle]],
                color=_COLOURS[leak],
                label=f"leak {leak}" if place == 0 else None,
                error_kw={"lw": 1, "ecolor": INK},
            )
    axes.set_xticks(range(len(strategies)), strategies)
    axes.legend(fontsize=8, frameon=False)
    save_picture(figure, DILEMMA)

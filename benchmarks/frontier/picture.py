# SPDX-License-Identifier: Apache-2.0
"""The picture of the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from benchmarks.frontier.points import Points
from benchmarks.frontier.rules import NONE
from benchmarks.harness.pictures import BLUE, GREEN, INK, ORANGE, PALE, RED, panels, save_picture

_COLOURS = {
    "first": BLUE,
    "last": PALE,
    "random": INK,
    "attention": RED,
    "keys": ORANGE,
    "first layers": GREEN,
    "middle layers": "#8a5fbf",
}


def draw(tasks: Mapping[str, Points], name: str) -> None:
    """Draw charge against KL, one panel per task, as the picture `name`."""
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
    save_picture(figure, name)

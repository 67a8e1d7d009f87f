# SPDX-License-Identifier: Apache-2.0
"""Plots of what was measured, in the colours of `vllm_choreo.lab.report.picture`; no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import RESULTS
from benchmarks.harness.stats import median, spread

INK, PALE, BLUE, RED = "#1f2430", "#8a93a3", "#2f6fb3", "#d64545"
ORANGE, GREEN = "#e09a2b", "#2a9d7f"


def panels(titles: Sequence[str], height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure with one pair of axes per title, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.9 * len(titles), height), facecolor="#fbfbf9", layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = [figure.add_subplot(1, len(titles), i + 1) for i in range(len(titles))]
    for axes, title in zip(all_axes, titles, strict=True):
        axes.set_title(title, fontsize=11, weight="bold", color=INK, loc="left")
        axes.set_facecolor("#ffffff")
        axes.grid(True, color="#e6e8ec", lw=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=8.5, which="both")
        for side in axes.spines:
            axes.spines[side].set_visible(side in ("left", "bottom"))
            axes.spines[side].set_color(PALE)
    return figure, all_axes


def draw_line(
    axes: Any, x: Sequence[float], values: Sequence[Sequence[float]], label: str, colour: str
) -> None:
    """Medians of `values`, one list per `x`, with their quartiles as a band."""
    axes.plot(x, list(map(median, values)), marker="o", ms=4, lw=1.6, color=colour, label=label)
    low, high = zip(*map(spread, values), strict=True)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def name_ticks(axes: Any, x: Sequence[int]) -> None:
    """A logarithmic axis with the measured places named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.minorticks_off()


def logarithmic(axes: Any) -> None:
    """A logarithmic axis upwards, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save_picture(figure: Any, name: str) -> Path:
    """Write `results/<name>.png`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=110, facecolor=figure.get_facecolor())
    return path

# SPDX-License-Identifier: Apache-2.0
"""Drawing of the losses of a training (matplotlib, no display)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLOURS = {"train": "#9fb8d3", "development": "#d64545"}


def draw_curves(curves: Mapping[str, Sequence[Sequence[float]]], label: str, path: Path) -> None:
    """Draw losses over steps.

    Args:
        curves: lists of `[step, loss]`, by name.
        label: name of the loss, with its unit.
        path: file of the picture; the suffix says its kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        steps, losses = zip(*points, strict=True) if points else ((), ())
        marker = "o" if name == "development" else ""
        axes.plot(steps, losses, color=_COLOURS.get(name), marker=marker, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)

# SPDX-License-Identifier: Apache-2.0
"""The picture of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import INK, panels, save_picture
from benchmarks.sweep.bars import BARS, ratios


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """A heat map per kind of voters; blue is faster than the rival, red slower."""
    from matplotlib.colors import TwoSlopeNorm

    maps = {kind: cells for kind in BARS if (cells := ratios(rows, kind))}
    figure, all_axes = panels([f"{kind}: ratio end to end" for kind in maps])
    highest = max(value for cells in maps.values() for value in cells.values())
    norm = TwoSlopeNorm(vmin=0.5, vcenter=1.0, vmax=max(1.5, highest))
    for axes, cells in zip(all_axes, maps.values(), strict=True):
        counts, columns = (sorted({cell[i] for cell in cells}) for i in range(2))
        values = [[cells[row, column] for column in columns] for row in counts]
        axes.imshow(values, norm=norm, cmap="RdBu", origin="lower", aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(counts)), counts)
        axes.set_xlabel("voters", color=INK)
        axes.set_ylabel("candidates", color=INK)
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                shade = INK if 0.2 < norm(value) < 0.8 else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=shade)
    save_picture(figure, "sweep")

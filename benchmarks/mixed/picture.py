# SPDX-License-Identifier: Apache-2.0
"""The picture of the mixed load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, PALE, panels, save_picture
from benchmarks.mixed.bars import ttfts
from benchmarks.mixed.work import SIDES


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw which share of the ordinary requests waited at most how long."""
    figure, (axes,) = panels(("Ordinary requests: share that waited at most …",))
    for side, colour in zip(SIDES, (BLUE, PALE), strict=True):
        found = sorted(ttfts(rows, side))
        shares = [100 * (i + 1) / len(found) for i in range(len(found))]
        axes.step(found, shares, where="post", lw=1.6, color=colour, label=f"beside: {side}")
    axes.set_xlabel("ms to first token", fontsize=9)
    axes.set_ylabel("% of ordinary requests", fontsize=9)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    save_picture(figure, "mixed_ttft")

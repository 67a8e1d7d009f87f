# SPDX-License-Identifier: Apache-2.0
"""The picture of load: first tokens and whole answers against requests a second."""

from __future__ import annotations

from benchmarks.harness.pictures import BLUE, GREEN, INK, ORANGE, panels, save_picture
from benchmarks.harness.stats import median, percentile
from benchmarks.harness.tables import Rows, of, only
from benchmarks.variants.load import ADAPTIVE, OWN, PLAIN, PROFILE

_COLOURS = {OWN: INK, PLAIN: GREEN, PROFILE: BLUE, ADAPTIVE: ORANGE}


def draw(rows: Rows, name: str) -> None:
    """Draw a line for each of `SIDES` that was run: the median, and up to where nine of ten are.

    Args:
        rows: of a run; requests that came one at a time are left out.
        name: of the CSV file, and of the picture beside it.
    """
    titles = {"ttft_s": "First token, s", "latency_s": "Answer of 8 tokens, s"}
    figure, all_axes = panels([*titles.values()])
    for column, axes in zip(titles, all_axes, strict=True):
        for side, colour in _COLOURS.items():
            rates = sorted({float(row["rate"]) for row in only(side=side)(rows)} - {0.0})
            found = [of(column, side=side, rate=rate)(rows) for rate in rates]
            if not found:
                continue
            middle = [median(values) for values in found]
            axes.plot(rates, middle, "o-", ms=4, color=colour, label=side)
            tail = [percentile(values, 0.9) for values in found]
            axes.fill_between(rates, middle, tail, color=colour, alpha=0.15, lw=0)
        axes.set_yscale("log")
        axes.set_xlabel("requests a second")
    all_axes[0].legend(fontsize=8, frameon=False)
    save_picture(figure, name)

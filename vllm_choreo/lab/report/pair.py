# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of a profiled pair: which layers matter, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_choreo.lab.report.frontier import Frontier, Point, frontier
from vllm_choreo.lab.report.markup import filled, interval, milliseconds, nats, percent, whole

_SIDE = 300  # of the heat map, in its own units
_HEAD = (
    *("layers anew", "right", "difference, points", "KL to own encoding, nats per token"),
    *("KL gap closed", "tokens encoded", "TTFT"),
)

Cell = Mapping[str, Any]


def pair_html(data: Mapping[str, Any], advice: str) -> str:
    """Draw the page.

    Args:
        data: content of profile.json.
        advice: a sentence that says what to do.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    profile = data["profile"]
    compared = () if data["layer_map"] is None else data["layer_map"]["compared"]
    drawn = {
        "advice": advice,
        "squares": heat_map(profile["cells"], profile["num_layers"]),
        "best": _frontier(profile["cells"]),
        "compared": [_compared(**pair) for pair in compared],
        "head": _HEAD,
        "sets": [{**one, "cells": map(_cells, one["rows"])} for one in data["sets"]],
    }
    return filled("pair.html", {**data, **drawn})


class Square(NamedTuple):
    """A block of layers in the heat map.

    Attributes:
        x, y, side: place of its upper left corner and its size, in units of the picture.
        dark: how dark it is, from 0 (all is lost) to 1.
        about: measurements of the block; "": it is as the nearest one that was measured.
    """

    x: float
    y: float
    side: float
    dark: float
    about: str


def heat_map(cells: Sequence[Cell], num_layers: int) -> list[Square]:
    """Lay out the loss that each block of layers leaves, that of the nearest one measured."""
    blocks = {tuple(cell["layers"][0]): cell for cell in cells if len(cell["layers"]) == 1}
    squares, side = [], _SIDE / num_layers
    for first in range(num_layers):
        for stop in range(first + 1, num_layers + 1):
            nearest = min(blocks, key=lambda b: abs(b[0] - first) + abs(b[1] - stop))
            cell = blocks[nearest]
            dark = 1.0 - min(1.0, max(0.0, cell["quality_loss"]))
            about = _about(cell, first, stop) if nearest == (first, stop) else ""
            squares.append(Square((stop - 1) * side, first * side, side, dark, about))
    return squares


def _about(cell: Cell, first: int, stop: int) -> str:
    return (
        f"layers {first} to {stop}: loss {percent(cell['quality_loss'])}, "
        f"{nats(cell['kl'])} nats per token, {milliseconds(cell['ttft'])}"
    )


def _frontier(cells: Sequence[Cell]) -> Frontier:
    """Picture of the cells that no cell of fewer layers beats, by time to the first token."""
    best: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (_num_run(cell), cell["quality_loss"])):
        if not best or cell["quality_loss"] < best[-1]["quality_loss"]:
            best.append(cell)
    points = [
        Point(_name(cell), cell["ttft"], cell["kl"], cell["kl_low"], cell["kl_high"], number)
        for number, cell in enumerate(best)
    ]
    of, by = "KL to the reader's own encoding, nats per token", "time to first token"
    return frontier(points, of, by, nats, milliseconds)


def _num_run(cell: Cell) -> int:
    return sum(stop - first for first, stop in cell["layers"])


def _name(cell: Cell) -> str:
    return ", ".join(f"{first}–{stop}" for first, stop in cell["layers"]) or "none"


def _compared(scattered: Cell, contiguous: Cell) -> list[str]:
    """Row of the best single layers beside the best block of as many."""
    found = ((_name(cell), percent(1 - cell["quality_loss"])) for cell in (scattered, contiguous))
    return [str(_num_run(scattered)), *(text for pair in found for text in pair)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    judged = row["judged"]
    return [
        *(row["arm"], f"{row['right']} of {judged}" if judged else "–"),
        *(percent(row["difference"], sign=True), interval(row, "kl")),
        *(percent(row["kl_gap_closed"]), whole(row["encoded"]), milliseconds(row["ttft"])),
    ]

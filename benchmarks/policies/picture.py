# SPDX-License-Identifier: Apache-2.0
"""The picture of the drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, INK, RED, draw_line, name_ticks, panels, save_picture

_LINES = (
    ("in_place", "attention, keys moved in place", RED),
    ("keys", "keys, moved in place", INK),
    ("query", "attention, query turned", BLUE),
)


def draw_drift(rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw errors by the number of moves."""
    figure, (axes,) = panels(("Error after many moves, bfloat16",))
    moves = list(dict.fromkeys(int(row["moves"]) for row in rows))
    for column, label, colour in _LINES:
        values = [
            [100 * float(row[column]) for row in rows if int(row["moves"]) == count]
            for count in moves
        ]
        draw_line(axes, moves, values, label, colour)
    name_ticks(axes, moves)
    axes.set_xlabel("moves", fontsize=9)
    axes.set_ylabel("relative error, %", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5)
    save_picture(figure, "policies_drift")

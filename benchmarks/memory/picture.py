# SPDX-License-Identifier: Apache-2.0
"""The picture of a long session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, panels, save_picture
from benchmarks.memory.bars import PROCESSES


def draw_long_session(rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw what each process holds, call by call."""
    figure, all_axes = panels([f"Memory of the {name}, MB" for name in PROCESSES])
    for axes, column in zip(all_axes, PROCESSES.values(), strict=True):
        calls = [int(row["calls"]) for row in rows]
        axes.plot(calls, [int(row[column]) / 1e6 for row in rows], color=BLUE, lw=1.4)
        axes.set_xlabel("calls", fontsize=9)
        axes.set_ylim(bottom=0)
    save_picture(figure, "long_session")

# SPDX-License-Identifier: Apache-2.0
"""The picture of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.model.bounds import GPUS
from benchmarks.gpu.model.cost import GRAPHS, TODAY
from benchmarks.harness.pictures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    RED,
    logarithmic,
    name_ticks,
    panels,
    save_picture,
)

MODEL, WORKFLOW, READERS = "Llama-3.1-8B", "parallel debate", 3
_OF_GPU = dict(zip(GPUS, (BLUE, GREEN, ORANGE), strict=True))
_OF_WAY = {TODAY.name: RED, GRAPHS.name: GREEN}
Rows = Sequence[Mapping[str, Any]]


def draw(runs: Rows, lengths: Rows) -> None:
    """Write `results/gpu_model.png` of the rows of `predict`; all in it is predicted."""
    titles = (
        f"Predicted: to first token, {MODEL}",
        f"Predicted: {WORKFLOW}, end to end",
        f"Answers that gain, {READERS} readers",
    )
    figure, (first, whole, answers) = panels(titles)
    runs = [row for row in runs if row["model"] == MODEL]
    _draw_first_tokens(first, runs)
    _draw_whole(whole, [row for row in runs if row["workflow"] == WORKFLOW])
    chosen = [r for r in lengths if r["model"] == MODEL and r["readers"] == READERS]
    _draw_lengths(answers, chosen)
    save_picture(figure, "gpu_model")


def _draw_first_tokens(axes: Any, runs: Rows) -> None:
    workflows = list(dict.fromkeys(row["workflow"] for row in runs))
    for i, gpu in enumerate(GPUS):
        rows = [row for row in runs if row["gpu"] == gpu and row["side"] == TODAY.name]
        at = [j + 0.2 * (i - 1) for j in range(len(rows))]
        _draw_bounds(axes, at, rows, "first_token_ratio", gpu, _OF_GPU[gpu])
    _finish(axes, workflows, "stock / choreographed")


def _draw_whole(axes: Any, runs: Rows) -> None:
    for i, (way, colour) in enumerate(_OF_WAY.items()):
        rows = [row for row in runs if row["side"] == way]
        at = [j + 0.2 * (i - 0.5) for j in range(len(rows))]
        _draw_bounds(axes, at, rows, "total_ratio", way, colour)
    _finish(axes, list(GPUS), "stock / choreographed")


def _draw_bounds(
    axes: Any, at: Sequence[float], rows: Rows, figure: str, label: str, colour: str
) -> None:
    values = [row[figure] for row in rows]
    ends = (
        [row[figure] - row[f"{figure}_low"] for row in rows],
        [row[f"{figure}_high"] - row[figure] for row in rows],
    )
    axes.errorbar(at, values, yerr=ends, fmt="o", ms=5, capsize=3, color=colour, label=label)


def _finish(axes: Any, names: Sequence[str], what: str) -> None:
    axes.axhline(1.0, color=INK, lw=0.9)
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    axes.set_ylabel(what, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5)


def _draw_lengths(axes: Any, lengths: Rows) -> None:
    """Longest answers that gain; a line ends where all do."""
    for gpu, colour in _OF_GPU.items():
        rows = [r for r in lengths if r["gpu"] == gpu and r["side"] == TODAY.name]
        drawn = [r for r in rows if 0 < r["break_even_tokens"] < float("inf")]
        x, y = ([r[key] for r in drawn] for key in ("read_tokens", "break_even_tokens"))
        axes.plot(x, y, marker="o", ms=3, lw=1.5, color=colour, label=gpu)
    logarithmic(axes)
    name_ticks(axes, sorted({r["read_tokens"] for r in lengths})[::3])
    axes.set_xlabel("tokens that each call reads", fontsize=9)
    axes.set_ylabel("tokens of an answer, at most", fontsize=9)
    axes.axhline(400, color=PALE, lw=0.9)
    axes.legend(frameon=False, fontsize=7.5)

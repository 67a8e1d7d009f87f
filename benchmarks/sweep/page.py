# SPDX-License-Identifier: Apache-2.0
"""The page and the picture of the sweep, from its CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.pictures import INK, panels, save_picture
from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_interval

# Ratio of the best cell, at least.
BARS = {"identical voters": 2.2, "voters with roles": 4.0}
STAGES = ("task", "candidates", "votes", "answer")
Rows = Sequence[Mapping[str, Any]]
Cell = tuple[int, int]  # candidates, voters


def section() -> str:
    """This benchmark's part of RESULTS.md and its picture, from its CSV file."""
    rows = read_csv("sweep")
    if not rows:
        return ""
    kinds = [kind for kind in BARS if _ratios(rows, kind)]
    picture = _draw({kind: _medians(rows, kind) for kind in kinds})
    parts = [
        "## Tree of thoughts, by candidates and voters",
        _in_words(rows),
        f"![ratios](results/{picture.name})",
    ]
    for kind in kinds:
        parts += _kind_parts(rows, kind)
    model = (
        "Cost model: prefilling takes one step per stage over all tokens that have to be encoded, "
        "at the speed measured on this machine without any context; the rest of the stock side's "
        "time stays. It knows neither that attention over long contexts takes longer, nor that "
        "voters who read the same candidates together decode faster."
    )
    return "\n\n".join([*parts, model, _below_one(rows), machine_line(rows)])


def _in_words(rows: Rows) -> str:
    first = rows[0]
    _, _, block_size = first["stock_side"].partition(", ")
    rival = "vLLM's prefix caching on the same engine"
    if block_size:
        where = f"in a process without the plugin, block size: {block_size}"
        rival = f"stock vLLM with prefix caching ({where})"
    return (
        f"End to end, {rival} / choreographed; above 1, choreography is "
        f"faster. Question {first['question_tokens']} tokens, candidates "
        f"{first['candidate_tokens']}, votes {first['vote_tokens']} (a number and the reason), "
        f"final answer {first['final_tokens']}; the same given tokens on both sides, in turn. "
        f"Medians of {len({row['rep'] for row in rows})} run(s) of each side, for more than one "
        "with their 95% bootstrap interval; in brackets what the cost model says."
    )


def _kind_parts(rows: Rows, kind: str) -> list[str]:
    cells = _medians(rows, kind)
    best = max(cells, key=lambda cell: cells[cell])
    verdict = "reached" if cells[best] >= BARS[kind] else "MISSED"
    return [
        f"**{kind.capitalize()}.** Best cell {cells[best]:.2f}; bar {BARS[kind]}: {verdict}.",
        _grid(rows, kind),
        "Seconds of the stages in the best cell:",
        _stage_table(rows, kind, best),
    ]


def _draw(maps: Mapping[str, Mapping[Cell, float]]) -> Path:
    """A heat map per kind of voters; blue is faster than the rival, red slower."""
    from matplotlib.colors import TwoSlopeNorm

    figure, all_axes = panels([f"{kind}: ratio end to end" for kind in maps])
    highest = max(value for cells in maps.values() for value in cells.values())
    norm = TwoSlopeNorm(vmin=0.5, vcenter=1.0, vmax=max(1.5, highest))
    for axes, cells in zip(all_axes, maps.values(), strict=True):
        rows, columns = (sorted({cell[i] for cell in cells}) for i in range(2))
        values = [[cells[row, column] for column in columns] for row in rows]
        axes.imshow(values, norm=norm, cmap="RdBu", origin="lower", aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("voters", color=INK)
        axes.set_ylabel("candidates", color=INK)
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                shade = INK if 0.2 < norm(value) < 0.8 else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=shade)
    return save_picture(figure, "sweep")


def bars_reached(rows: Rows) -> bool:
    """Whether the best cell of either kind is good enough."""
    return all(
        max(_medians(rows, kind).values()) >= bar
        for kind, bar in BARS.items()
        if _ratios(rows, kind)
    )


def _ratios(rows: Rows, kind: str) -> dict[Cell, list[float]]:
    """Stock / choreographed of every run, by (candidates, voters)."""
    cells: dict[Cell, list[float]] = {}
    for row in rows:
        if row["kind"] == kind:
            cell = (int(row["candidates"]), int(row["voters"]))
            cells.setdefault(cell, []).append(float(row["stock_s"]) / float(row["choreo_s"]))
    return cells


def _medians(rows: Rows, kind: str) -> dict[Cell, float]:
    return {cell: median(values) for cell, values in _ratios(rows, kind).items()}


def _grid(rows: Rows, kind: str) -> str:
    ratios = _ratios(rows, kind)
    columns = sorted({voters for _, voters in ratios})
    lines = [
        (
            count,
            *(
                f"{_cell(ratios[count, voters])} ({_expected(rows, kind, (count, voters)):.2f})"
                for voters in columns
            ),
        )
        for count in sorted({candidates for candidates, _ in ratios})
    ]
    return table(("candidates", *(f"{voters} voters" for voters in columns)), lines)


def _cell(values: Sequence[float]) -> str:
    return f"{values[0]:.2f}" if len(values) == 1 else with_interval(values, ".2f")


def _expected(rows: Rows, kind: str, cell: Cell) -> float:
    """The ratio of the cost model."""
    total, stock, choreo = (
        median(float(row[column]) for row in _runs(rows, kind, cell))
        for column in ("stock_s", "stock_expected_prefill_s", "choreo_expected_prefill_s")
    )
    return total / (total - stock + choreo)


def _stage_table(rows: Rows, kind: str, cell: Cell) -> str:
    lines = [
        (
            f"{side}, {cell[0]} candidates, {cell[1]} voters",
            *(
                f"{median(float(row[f'{side}_{stage}_s']) for row in _runs(rows, kind, cell)):.2f}"
                for stage in (*STAGES[:-1], "vote_ttft", STAGES[-1])
            ),
        )
        for side in ("stock", "choreo")
    ]
    return table(("side", *STAGES[:-1], "of which to the first token", STAGES[-1]), lines)


def _runs(rows: Rows, kind: str, cell: Cell) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if row["kind"] == kind and (int(row["candidates"]), int(row["voters"])) == cell
    ]


def _below_one(rows: Rows) -> str:
    """Where choreography is slower, and in which stage it loses the time."""
    slow = [
        (kind, cell) for kind in BARS for cell, ratio in _medians(rows, kind).items() if ratio < 1
    ]
    if not slow:
        return "No cell is below 1."
    lost = {stage: sum(_lost(rows, kind, cell, stage) for kind, cell in slow) for stage in STAGES}
    shares = ", ".join(f"{stage} {1e3 * seconds:+.0f} ms" for stage, seconds in lost.items())
    return (
        f"Below 1 are {len(slow)} cells: "
        + ", ".join(f"{b} candidates x {v} voters ({kind})" for kind, (b, v) in slow)
        + f". In them, choreographed stages took longer by, in sum: {shares}. The task is the "
        "prefill of question, ballot and roles, which as text costs nothing until a call reads "
        "them; votes are where choreography saves, and few short candidates leave little to save."
    )


def _lost(rows: Rows, kind: str, cell: Cell, stage: str) -> float:
    """Median seconds by which a stage took longer choreographed."""
    return median(
        float(row[f"choreo_{stage}_s"]) - float(row[f"stock_{stage}_s"])
        for row in _runs(rows, kind, cell)
    )

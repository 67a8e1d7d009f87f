# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts over the numbers of candidates and voters: end to end against prefix caching.

    python -m benchmarks.bench_sweep [--sizes 2 4 8 16] [--reps 1] [--candidate-tokens 48]
    python -m benchmarks.bench_sweep --full

(a) identical voters, whose prompts are one text; (b) voters who read a role of their own first. As
in Figure 5 of *Prompt Choreography*. Answers are given, of the same lengths in every cell, and
replayed on both sides in turn: see `sides`, `script`. `--full`: candidates of 400 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_workflows import CostModel
from benchmarks.common import (
    command_line,
    machine,
    machine_line,
    median,
    read_csv,
    set_environment,
    table,
    write_csv,
)
from benchmarks.pictures import INK, panels, save_picture
from benchmarks.sides import SIDES, Side, open_sides, replay_in_turn
from benchmarks.stats import bootstrap_interval
from vllm_choreo.workflows.record.transcript import Transcript

SIZES = (2, 4, 8, 16)
# Ratio of the best cell, at least.
BARS = {"identical voters": 2.2, "voters with roles": 4.0}
SHOWN = ("kind", "candidates", "voters", "rep", "stock_s", "choreo_s")
STAGES = ("task", "candidates", "votes", "answer")
KV_CACHE_GIB = 8  # so that 16 voters' own copies of 16 candidates fit
MAX_MODEL_LEN = 8192
QUESTION = (
    "A rectangular garden is twice as long as it is wide. A path of 1.5 metres runs around it on "
    "the outside, and the path alone covers 117 square metres. The owner wants to plant one rose "
    "for every 4 square metres of the garden. How many roses does she need, and how long must the "
    "fence be that encloses garden and path together?"
)
ROLE = "You are judge number {} of {}. You judge solutions by whether {}."
CRITERIA = (
    "every step follows from the one before",
    "the numbers are right",
    "the question is answered in full",
    "the reasoning is easy to follow",
)


def main() -> int:
    args = _arguments()
    set_environment(KV_CACHE_GIB)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        for rep in range(args.reps):
            with open_sides(["choreo", args.stock], KV_CACHE_GIB, MAX_MODEL_LEN) as sides:
                rows += _rep(sides, path, rep, args)
    record = {**machine(), "command": command_line("bench_sweep")}
    write_csv("sweep", rows, **record)
    print(section())
    return int(not bars_reached(rows))


def _rep(
    sides: Sequence[Side], path: Path, rep: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every cell once."""
    model = CostModel(sides[1].ask("steps", repeats=3))
    _write_script(sides[0], path, args.kinds[0], 2, 2, args)
    replay_in_turn(sides, path, rep)  # what is done once only shall not be timed
    rows = []
    cells = itertools.product(args.kinds, args.sizes, args.sizes)
    for turn, (kind, candidates, voters) in enumerate(cells, start=rep):
        _write_script(sides[0], path, kind, candidates, voters, args)
        runs = replay_in_turn(sides, path, turn)
        rows.append(_row(kind, candidates, voters, rep, runs, args, model))
        print({name: rows[-1][name] for name in SHOWN}, flush=True)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="lengths as in the paper; an hour")
    parser.add_argument("--kinds", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--candidate-tokens", type=int, default=48)
    parser.add_argument("--vote-tokens", type=int, default=12)
    parser.add_argument("--final-tokens", type=int, default=12)
    stock = [side for side in SIDES if side != "choreo"]
    parser.add_argument("--stock", choices=stock, default=stock[0], help="block size of the rival")
    if "--full" in sys.argv:
        parser.set_defaults(reps=2, candidate_tokens=400, vote_tokens=200, final_tokens=100)
    return parser.parse_args()


def _write_script(
    side: Side, path: Path, kind: str, candidates: int, voters: int, args: argparse.Namespace
) -> None:
    """The transcript of a cell."""
    roles = [ROLE.format(i + 1, voters, CRITERIA[i % len(CRITERIA)]) for i in range(voters)]
    inputs = {
        "question": QUESTION,
        "candidates": candidates,
        "voters": roles if kind == "voters with roles" else voters,
    }
    # By a word of the headers of the three kinds of answers.
    lengths = {
        "Candidate": args.candidate_tokens,
        "best": args.vote_tokens,
        "Final": args.final_tokens,
    }
    side.ask("script", workflow="tree_of_thoughts", inputs=inputs, lengths=lengths, path=str(path))


def _row(
    kind: str,
    candidates: int,
    voters: int,
    rep: int,
    runs: Mapping[str, Transcript],
    args: argparse.Namespace,
    model: CostModel,
) -> dict[str, Any]:
    choreo, stock = runs["choreo"], runs[args.stock]
    row = {"kind": kind, "candidates": candidates, "voters": voters, "rep": rep}
    for name, run in (("stock", stock), ("choreo", choreo)):
        row[f"{name}_s"] = round(run.seconds, 4)
        row[f"{name}_expected_prefill_s"] = round(model.prefill_seconds(run), 4)
        for stage in STAGES:
            row[f"{name}_{stage}_s"] = round(_stage_seconds(run, stage), 4)
        row[f"{name}_vote_ttft_s"] = round(
            median(s.message.metrics.ttft for s in run.steps if s.stage == "votes"), 4
        )
    return {
        **row,
        "question_tokens": choreo.steps[0].message.num_tokens,
        "candidate_tokens": args.candidate_tokens,
        "vote_tokens": args.vote_tokens,
        "final_tokens": args.final_tokens,
        "stock_side": args.stock,
    }


def _stage_seconds(run: Transcript, stage: str) -> float:
    """From the submission of a stage's calls to the end of the last one.

    The task is ready when the candidates are submitted.
    """
    if stage == "task":
        return min(s.message.metrics.submitted for s in run.steps if s.stage == "candidates")
    return max(s.message.metrics.latency for s in run.steps if s.stage == stage)


# -- the page ------------------------------------------------------------------------------------


def section() -> str:
    """This benchmark's part of RESULTS.md and its picture, from its CSV file."""
    rows = read_csv("sweep")
    if not rows:
        return ""
    first = rows[0]
    kinds = [kind for kind in BARS if _ratios(rows, kind)]
    picture = _draw({kind: _medians(rows, kind) for kind in kinds})
    parts = [
        "## Tree of thoughts, by candidates and voters",
        "End to end, stock vLLM with prefix caching (in a process without the plugin, block size: "
        f"{first['stock_side'].partition(', ')[2]}) / choreographed; above 1, choreography is "
        f"faster. Question {first['question_tokens']} tokens, candidates "
        f"{first['candidate_tokens']}, votes {first['vote_tokens']} (a number and the reason), "
        f"final answer {first['final_tokens']}; the same given tokens on both sides, in turn. "
        f"Medians of {len({row['rep'] for row in rows})} run(s) of each side, for more than one "
        "with their 95% bootstrap interval; in brackets what the cost model says.",
        f"![ratios](results/{picture.name})",
    ]
    for kind in kinds:
        cells = _medians(rows, kind)
        best = max(cells, key=lambda cell: cells[cell])
        verdict = "reached" if cells[best] >= BARS[kind] else "MISSED"
        parts += [
            f"**{kind.capitalize()}.** Best cell {cells[best]:.2f}; bar {BARS[kind]}: {verdict}.",
            _grid(rows, kind),
            "Seconds of the stages in the best cell:",
            _stage_table(rows, kind, best),
        ]
    model = (
        "Cost model: prefilling takes one step per stage over all tokens that have to be encoded, "
        "at the speed measured on this machine without any context; the rest of the stock side's "
        "time stays. It knows neither that attention over long contexts takes longer, nor that "
        "voters who read the same candidates together decode faster."
    )
    return "\n\n".join([*parts, model, _below_one(rows), machine_line(rows)])


def _draw(maps: Mapping[str, Mapping[tuple[int, int], float]]) -> Path:
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


def bars_reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the best cell of either kind is good enough."""
    return all(
        max(_medians(rows, kind).values()) >= bar
        for kind, bar in BARS.items()
        if _ratios(rows, kind)
    )


def _ratios(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[int, int], list[float]]:
    """Stock / choreographed of every run, by (candidates, voters)."""
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["kind"] == kind:
            cell = (int(row["candidates"]), int(row["voters"]))
            cells.setdefault(cell, []).append(float(row["stock_s"]) / float(row["choreo_s"]))
    return cells


def _medians(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[int, int], float]:
    return {cell: median(values) for cell, values in _ratios(rows, kind).items()}


def _grid(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
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
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, high = bootstrap_interval(values)
    return f"{median(values):.2f} [{low:.2f}, {high:.2f}]"


def _expected(rows: Sequence[Mapping[str, Any]], kind: str, cell: tuple[int, int]) -> float:
    """The ratio of the cost model."""
    total, stock, choreo = (
        median(float(row[column]) for row in _runs(rows, kind, cell))
        for column in ("stock_s", "stock_expected_prefill_s", "choreo_expected_prefill_s")
    )
    return total / (total - stock + choreo)


def _stage_table(rows: Sequence[Mapping[str, Any]], kind: str, cell: tuple[int, int]) -> str:
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


def _runs(
    rows: Sequence[Mapping[str, Any]], kind: str, cell: tuple[int, int]
) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if row["kind"] == kind and (int(row["candidates"]), int(row["voters"])) == cell
    ]


def _below_one(rows: Sequence[Mapping[str, str]]) -> str:
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


def _lost(rows: Sequence[Mapping[str, str]], kind: str, cell: tuple[int, int], stage: str) -> float:
    """Median seconds by which a stage took longer choreographed."""
    return median(
        float(row[f"choreo_{stage}_s"]) - float(row[f"stock_{stage}_s"])
        for row in _runs(rows, kind, cell)
    )


if __name__ == "__main__":
    sys.exit(main())

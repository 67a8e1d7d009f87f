# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts over the numbers of candidates and voters: end to end against prefix caching.

    python -m benchmarks.sweep [--sizes 2 4 8 16] [--passes 6] [--candidate-tokens 48]
    python -m benchmarks.sweep --full
    python -m benchmarks.sweep --processes

(a) identical voters, whose prompts are one text; (b) voters who read a role of their own first. As
in Figure 5 of *Prompt Choreography*. Answers are given, of the same lengths in every cell, and
replayed on both sides in turn: see `benchmarks.harness.sides`. `--full`: candidates of 400 tokens.
`--processes`: against stock vLLM, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cost_model import CostModel
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.sides import ON_ONE_ENGINE, Room, Side, passes, replay_in_turn
from benchmarks.harness.stats import median
from benchmarks.harness.tables import as_text
from benchmarks.sweep.bars import BARS, bars_reached
from benchmarks.sweep.picture import draw
from benchmarks.sweep.tables import TABLES
from vllm_choreo.transcript.transcript import Transcript

SIZES = (2, 4, 8, 16)
STAGES = ("task", "candidates", "votes", "answer")
SHOWN = ("kind", "candidates", "voters", "rep", "stock_s", "choreo_s")
ROOM = Room(kv_cache_gib=8, max_model_len=8192)  # 16 voters' own copies of 16 candidates fit
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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        names = ("choreo", "stock, 32") if args.processes else ON_ONE_ENGINE
        for number, sides in passes(names, args.passes, ROOM, args.processes):
            if number == 1 or args.processes:
                model = CostModel(sides[1].ask("steps", repeats=3))
                _write_script(sides[0], path, args.kinds[0], 2, 2, args)
                replay_in_turn(sides, path, 0)  # what is done once only shall not be timed
            rows += _pass(sides, path, number, args, model)
    write_csv("sweep", rows, **record())
    draw(rows)
    print(as_text(TABLES.values()))
    return int(not bars_reached(rows))


def _pass(
    sides: Sequence[Side], path: Path, number: int, args: argparse.Namespace, model: CostModel
) -> list[dict[str, Any]]:
    """Every cell once."""
    rows = []
    cells = itertools.product(args.kinds, args.sizes, args.sizes)
    for turn, (kind, candidates, voters) in enumerate(cells, start=number):
        _write_script(sides[0], path, kind, candidates, voters, args)
        runs = replay_in_turn(sides, path, turn)
        cell = {"kind": kind, "candidates": candidates, "voters": voters, "rep": number - 1}
        rows.append({**cell, **_figures(runs, args, model, sides[1].name)})
        print({name: rows[-1][name] for name in SHOWN}, flush=True)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="lengths as in the paper; hours")
    parser.add_argument("--processes", action="store_true", help="against stock vLLM")
    parser.add_argument("--kinds", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--passes", type=int, help="6; with --processes: 1")
    parser.add_argument("--candidate-tokens", type=int, default=48)
    parser.add_argument("--vote-tokens", type=int, default=12)
    parser.add_argument("--final-tokens", type=int, default=12)
    if "--full" in sys.argv:
        parser.set_defaults(candidate_tokens=400, vote_tokens=200, final_tokens=100)
    args = parser.parse_args()
    args.passes = args.passes or (1 if args.processes else 6)
    return args


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


def _figures(
    runs: Mapping[str, Transcript], args: argparse.Namespace, model: CostModel, rival: str
) -> dict[str, Any]:
    choreo, stock = runs["choreo"], runs[rival]
    row: dict[str, Any] = {}
    for name, run in (("stock", stock), ("choreo", choreo)):
        row[f"{name}_s"] = round(run.seconds, 4)
        row[f"{name}_expected_prefill_s"] = round(model.prefill_seconds(run), 4)
        for stage in STAGES:
            row[f"{name}_{stage}_s"] = round(_stage_seconds(run, stage), 4)
        votes = [s.message.metrics.ttft for s in run.steps if s.stage == "votes"]
        row[f"{name}_vote_ttft_s"] = round(median(votes), 4)
    return {
        **row,
        "question_tokens": choreo.steps[0].message.num_tokens,
        "candidate_tokens": args.candidate_tokens,
        "vote_tokens": args.vote_tokens,
        "final_tokens": args.final_tokens,
        "stock_side": rival,
    }


def _stage_seconds(run: Transcript, stage: str) -> float:
    """From the submission of a stage's calls to the end of the last one.

    The task is ready when the candidates are submitted.
    """
    if stage == "task":
        return min(s.message.metrics.submitted for s in run.steps if s.stage == "candidates")
    return max(s.message.metrics.latency for s in run.steps if s.stage == stage)


if __name__ == "__main__":
    sys.exit(main())

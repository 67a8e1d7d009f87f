# SPDX-License-Identifier: Apache-2.0
"""Workflows against vLLM's prefix caching: time to first token, and end to end.

    python -m benchmarks.workflows [--questions 2] [--passes 6] [--answer-tokens 64]
    python -m benchmarks.workflows --full [--questions 12] [--passes 1] [--data FILE]
    python -m benchmarks.workflows --processes [--passes 2]

Tree of thoughts (identical voters), iterative debate and parallel debate on mathematical questions.
Each question's answers are generated once without choreography, then replayed, token by token, on
every side in turn: see `benchmarks.harness.sides`. `--full` has answers as long as those of the
paper's Table 5; the bars count there alone, for what a call saves grows with what it need not
encode again. Several lengths (`--answer-tokens 100 200 400`) are the questions' in turn, for the
gains end to end against tokens generated (the paper's Figure 7), in a file of their own. `--add`
asks so many further questions, and rows of those before them stay.
`--processes` is the check against stock vLLM, in processes of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.harness.cost_model import CostModel
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.sides import (
    IN_PROCESSES,
    WORKFLOWS,
    Room,
    Side,
    passes,
    replay_in_turn,
)
from benchmarks.harness.tables import as_text
from benchmarks.workflows.bars import FULL_ANSWER_TOKENS, bars_reached, is_full
from benchmarks.workflows.picture import draw
from benchmarks.workflows.tables import CHECK, DECIDED, LENGTHS, TABLES
from vllm_choreo.lab.problems import Problem, algebra, counting, load_jsonl
from vllm_choreo.transcript.transcript import Transcript

SIDES = ("choreo", "repaired", "baseline")  # on one engine
ROOM = Room(kv_cache_gib=3, max_model_len=8192)
ADVICE = "\n\nReason step by step, and put the final answer in \\boxed{}."


def main() -> int:
    args = _arguments()
    by_length = len(args.answer_tokens) > 1
    name = CHECK if args.processes else LENGTHS if by_length else DECIDED
    known, known_steps = (read_csv(f"{name}{end}") if args.add else [] for end in ("", "_steps"))
    asked = asked_problems(args, known)
    runs: list[Mapping[str, Any]] = [*known]
    steps: list[Mapping[str, Any]] = [*known_steps]
    where = record()
    tasks: list[tuple[str, Path]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, sides in passes(args.sides, args.passes, ROOM, args.processes):
            if not tasks:
                tasks = _record(_baseline(sides), Path(folder), asked, args.verdict_tokens)
            if number == 1 or args.processes:
                for side in sides:  # what is done once only shall not be timed
                    side.replay(tasks[0][1])
                found = _steps(sides, number)
                steps += [{**row, **where} for row in found]
            runs += [{**row, **where} for row in _pass(sides, tasks, number, CostModel(found))]
            write_csv(name, runs)
            write_csv(f"{name}_steps", steps)
    if by_length:
        draw(runs, name)
    print(as_text([TABLES[name]]))
    has_bars = name == DECIDED and is_full(runs)
    return int(has_bars and not bars_reached(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="lengths as in the paper; an hour")
    parser.add_argument("--processes", action="store_true", help="the check against stock vLLM")
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="to the questions of the results")
    parser.add_argument("--passes", type=int, help="6; with --processes: 2")
    parser.add_argument("--data", type=Path, help="JSON lines with questions; default: generated")
    parser.add_argument("--answer-tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--verdict-tokens", type=int, default=16, help="votes and moderator")
    if "--full" in sys.argv:
        lengths = {"answer_tokens": [FULL_ANSWER_TOKENS], "verdict_tokens": 100}
        parser.set_defaults(questions=12, **lengths)
    args = parser.parse_args()
    args.sides = list(IN_PROCESSES if args.processes else SIDES)
    if args.processes and len(args.answer_tokens) > 1:
        parser.error("--processes takes one length of answers")
    args.passes = args.passes or (2 if args.processes else 6)
    return args


def _record(
    side: Side, folder: Path, asked: Sequence[tuple[Problem, int]], verdict_tokens: int
) -> list[tuple[str, Path]]:
    """Transcripts of every workflow on every question: (id of the question, file)."""
    verdicts = {"tree_of_thoughts": "vote_params", "iterative_debate": "verdict_params"}
    tasks: list[tuple[str, Path]] = []
    for problem, length in asked:
        for workflow in WORKFLOWS:
            path = folder / f"{len(tasks)}.json"
            lengths = {"sampling_params": length}
            if workflow in verdicts:
                lengths[verdicts[workflow]] = verdict_tokens
            inputs = {"question": problem.question + ADVICE}
            side.ask("record", workflow=workflow, inputs=inputs, lengths=lengths, path=str(path))
            tasks.append((problem.id, path))
            print(f"recorded {workflow} on {problem.id}", flush=True)
    return tasks


def asked_problems(
    args: argparse.Namespace, known: Sequence[Mapping[str, str]]
) -> list[tuple[Problem, int]]:
    """Problems, each with the tokens of its answers, behind those of known rows.

    Raises:
        SystemExit: the known rows are of other questions.
    """
    before = list(dict.fromkeys(row["question"] for row in known))
    problems = _problems(args, len(before) + args.questions)
    if before != [problem.id for problem in problems[: len(before)]]:
        raise SystemExit("--add: the results are of other questions; leave it out to replace them")
    found = list(zip(problems, cycle(args.answer_tokens), strict=False))[len(before) :]
    lengths = {row["longest_answer"] for row in known} - {str(n) for n in args.answer_tokens}
    if lengths:
        told = ", ".join(sorted(lengths))
        raise SystemExit(f"--add: the results have answers of {told} tokens, too; name all lengths")
    return found


def _problems(args: argparse.Namespace, number: int) -> list[Problem]:
    """The first problems of the data."""
    if args.data:
        return load_jsonl(args.data, number)
    count = (number + 1) // 2
    pairs = zip(algebra(count), counting(count), strict=True)
    return [problem for pair in pairs for problem in pair][:number]


def _baseline(sides: Sequence[Side]) -> Side:
    return next(side for side in sides if side.name == "baseline")


def _steps(sides: Sequence[Side], number: int) -> list[dict[str, Any]]:
    """What a step takes on each side, by its tokens."""
    return [
        {"side": side.name, "block_size": side.ask("block_size"), **row, "pass": number}
        for side in sides
        for row in side.ask("steps", repeats=3)
    ]


def _pass(
    sides: Sequence[Side], tasks: Sequence[tuple[str, Path]], number: int, model: CostModel
) -> list[dict[str, Any]]:
    rows = []
    for turn, (question, path) in enumerate(tasks):
        runs = replay_in_turn(sides, path, turn + number)
        rows += [_row(number, question, side, run, model) for side, run in runs.items()]
        seconds = {side: round(run.seconds, 2) for side, run in runs.items()}
        print(f"pass {number} {question} {runs['choreo'].workflow}: {seconds}", flush=True)
    return rows


def _row(
    number: int, question: str, side: str, run: Transcript, model: CostModel
) -> dict[str, Any]:
    ttfts = [step.message.metrics.ttft for step in run.decodes()]
    expected = model.first_tokens(run)
    return {
        "pass": number,
        "question": question,
        "workflow": run.title,
        "side": side,
        "seconds": round(run.seconds, 4),
        "calls": len(ttfts),
        "ttft_mean_s": round(statistics.mean(ttfts), 5),
        "ttft_median_s": round(statistics.median(ttfts), 5),
        "decode_step_s": round(_decode_step_seconds(run), 6),
        "expected_ttft_mean_s": round(statistics.mean(expected), 5),
        "expected_prefill_s": round(model.prefill_seconds(run), 5),
        # Without the generated tokens: what had to be encoded before a token could be sampled.
        "prefilled_tokens": sum(step.message.num_prefilled for step in run.steps),
        "generated_tokens": sum(len(s.message.generated_token_ids) for s in run.steps),
        "longest_answer": max(len(s.message.generated_token_ids) for s in run.steps),
    }


def _decode_step_seconds(run: Transcript) -> float:
    """Mean seconds between the tokens of a call, over all calls."""
    messages = [step.message for step in run.decodes()]
    seconds = sum(m.metrics.latency - m.metrics.ttft for m in messages)
    return seconds / sum(len(m.generated_token_ids) - 1 for m in messages)


if __name__ == "__main__":
    sys.exit(main())

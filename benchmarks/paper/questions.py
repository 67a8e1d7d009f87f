# SPDX-License-Identifier: Apache-2.0
"""Which of two questions is answered, as they are encoded and placed? Table 1 of the paper.

    python -m benchmarks.paper.questions [--model MODEL] [--data FILE] [--pairs N]

A system text is the parent of both questions, and one answer is to answer both. As text the second
question sees the first one; serially and in parallel neither does, and in parallel both lie in one
place. Greedy decoding; an interval resamples pairs of questions. Rows of other files stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.record import record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.paper.tables import QUESTIONS, TABLES, TEXT
from vllm_choreo.cli.chat_turns import turns_of_model
from vllm_choreo.cli.engine import LocalEngine, start_engine
from vllm_choreo.lab.problems import Problem, load_jsonl, trivia
from vllm_choreo.lab.problems.grading import is_correct
from vllm_choreo.lab.workflows.multi_qa import multi_qa
from vllm_choreo.lab.workflows.together import all_made, run_together
from vllm_choreo.lab.workflows.variants import LAYOUTS

_TOGETHER = 8
# What is compared: its name, the mode of its session, and the variant of the workflow.
WAYS = (
    (TEXT, "baseline", "baseline"),
    ("serial", "choreo", "serial"),
    ("parallel", "choreo", "parallel"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the small test model")
    parser.add_argument("--data", type=Path, help="JSON lines; default: the project's own trivia")
    parser.add_argument("--pairs", type=int, help="default: 100 of a file, 30 of the project's own")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--layout", choices=LAYOUTS, default="paper")
    args = parser.parse_args()
    num = 2 * (args.pairs or (100 if args.data else 30))
    problems = load_jsonl(args.data, num) if args.data else trivia(num, 0)
    pairs = list(zip(problems[::2], problems[1::2], strict=True))
    engine = LocalEngine(start_engine(args.model, 2048))
    options = {
        "layout": args.layout,
        "turns": turns_of_model(args.model),
        "sampling_params": LocalEngine.sampling(temperature=0, max_tokens=args.max_tokens),
    }
    about = {"data": args.data.stem if args.data else "the project's own"}
    rows = [{**about, **row} for way in WAYS for row in answered(engine, way, pairs, options)]
    where = record()
    write_csv(QUESTIONS, [*rows_of_others(QUESTIONS, **about), *({**row, **where} for row in rows)])
    print(as_text([TABLES["paper_questions"]]))
    return 0


def answered(
    engine: Any,
    way: tuple[str, str, str],
    pairs: Sequence[tuple[Problem, Problem]],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Answer pairs of questions in one way; a row each, which says what of the answer is right."""
    name, mode, variant = way
    rows: list[dict[str, Any]] = []
    for start in range(0, len(pairs), _TOGETHER):
        some = pairs[start : start + _TOGETHER]
        programs = [
            partial(multi_qa, questions=[p.question for p in pair], variant=variant, **options)
            for pair in some
        ]
        with engine.open(mode) as c:
            runs = all_made(run_together(c, programs))
        for pair, run in zip(some, runs, strict=True):
            right = [int(is_correct(p.kind, run.answers[0], p.answers)) for p in pair]
            ids = " + ".join(p.id for p in pair)
            rows.append({"variant": name, "pair": ids, "first": right[0], "second": right[1]})
    return rows


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What choreography costs in answers: tasks that the small model can do, and next-token agreement.

    python -m benchmarks.quality [--limit 100] [--questions 24] [--data FILE]

Greedy decoding, so both sides of a comparison answer the same problems without any chance. The
tasks are made from seeds; their documents are messages of their own.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness.distributions import ENGINE_OPTIONS
from benchmarks.harness.engine import start_choreo_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.quality import agreement, answers
from benchmarks.quality.tables import TABLES
from benchmarks.quality.tasks import TASKS
from vllm_choreo.lab.problems import load_jsonl, word_problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=100, help="problems of each task")
    parser.add_argument("--questions", type=int, default=24, help="of the debates")
    parser.add_argument("--data", help="JSON lines with the debates' questions; default: generated")
    args = parser.parse_args()
    if args.limit < 3:
        parser.error("--limit must be at least 3: notes take the numbers of other problems")
    llm = start_choreo_engine(**ENGINE_OPTIONS)
    rows = [row for task in TASKS for row in answers.measure_task(llm, task, args.limit)]
    write_csv("quality_tasks", rows, **record())
    write_csv("quality_leakage", answers.measure_leakage(llm, args.limit), **record())
    if args.questions:
        if args.data:
            problems = load_jsonl(args.data, args.questions)
        else:
            problems = word_problems(args.questions, answers.SEED)
        debates = agreement.measure(llm, [problem.question for problem in problems])
        write_csv("quality_agreement", debates, **record())
    print(as_text(TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The frontier of repair: what each rule buys at each budget.

    python -m benchmarks.frontier [--problems 24] [--tasks look-up votes]

Per problem one session: its messages are encoded once, and read under every rule.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.frontier.measure import Reader
from benchmarks.frontier.picture import draw
from benchmarks.frontier.points import points_of
from benchmarks.frontier.rules import BUDGETS
from benchmarks.frontier.tables import TABLES
from benchmarks.frontier.tasks import TASKS
from benchmarks.harness.engine import FORCED, start_choreo_engine
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=24, help="of each task")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS], metavar="NAME")
    args = parser.parse_args()
    llm = start_choreo_engine(
        4,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        logits_processors=[FORCED],
        additional_config={"choreo": {"hidden_memory_gib": 0.5}},
    )
    rows = []
    for task in args.tasks:
        readings = TASKS[task](args.problems)
        for number, reading in enumerate(tqdm(readings, desc=task, unit="problem")):
            reader = Reader(llm, reading, BUDGETS, number)
            rows += [{"task": task, "problem": number, **row} for row in reader.rows()]
            reader.close()
        write_csv("frontier", rows, **record())
    draw(points_of(read_csv("frontier")))
    print(as_text(TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

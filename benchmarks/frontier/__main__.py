# SPDX-License-Identifier: Apache-2.0
"""The frontier of repair: what each rule buys at each budget.

    python -m benchmarks.frontier [--model MODEL] [--problems 24] [--tasks look-up votes]

Per problem one session: its messages are encoded once, and read under every rule. Readers write
ChatML, as the models do for which this is meant.
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
from benchmarks.harness.engine import FORCED, model_name, picture_name, start_choreo_engine
from benchmarks.harness.record import read_csv, record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text, only


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or name (default: the small test model)")
    parser.add_argument("--problems", type=int, default=24, help="of each task")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS], metavar="NAME")
    args = parser.parse_args()
    model = model_name(args.model)
    llm = start_choreo_engine(
        4,
        model=args.model,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        logits_processors=[FORCED],
        additional_config={"choreo": {"hidden_memory_gib": 0.5}},
    )
    others, rows, told = rows_of_others("frontier", model=model), [], record()
    for task in args.tasks:
        readings = TASKS[task](args.problems)
        for number, reading in enumerate(tqdm(readings, desc=task, unit="problem")):
            reader = Reader(llm, reading, BUDGETS, number)
            about = {"model": model, "task": task, "problem": number}
            rows += [{**about, **row, **told} for row in reader.rows()]
            reader.close()
        write_csv("frontier", [*others, *rows])
    draw(points_of(only(model=model)(read_csv("frontier"))), picture_name("frontier", args.model))
    print(as_text(TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Hit rates, times and batches of orders of the same calls, by the model of an engine.

    python -m benchmarks.planner.pressure [--workflow debate ...] [--queries 16] [--pools 1.2 0.5]
        [--width 16] [--add]

The model of an engine (`planner/physical/pool.py`) runs the calls of a workflow as text over a
prefix cache, in pools that hold all its prompts and answers or a part of them; nothing is merged,
kept or encoded before, so that the order alone is compared. `least` is the share of prompt tokens
that the best order could have found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.planner.pressure.simulate import MACHINES, WIDTH, OrderedRun, runs
from benchmarks.planner.pressure.tables import NAME, TABLES, WIDE
from benchmarks.planner.rivals.workloads import NAMES, add_sizes, asked_workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.set_defaults(queries=16, answer_tokens=100, words=400)
    parser.add_argument("--pools", type=float, nargs="+", default=[1.2, 0.5, 0.25, 0.1])
    parser.add_argument("--machine", choices=MACHINES, action="append")
    parser.add_argument("--width", type=int, default=WIDTH, help="calls at a time, at most")
    parser.add_argument("--add", action="store_true", help="to the rows of earlier runs")
    args = parser.parse_args()
    file = NAME if args.width == WIDTH else WIDE
    rows: list[dict[str, Any]] = [*read_csv(file)] if args.add else []
    for name in args.workflow or NAMES:
        name, one = asked_workload(name, args)
        for machine in args.machine or MACHINES:
            for pool in args.pools:
                what = {"workflow": name, "queries": args.queries, "machine": machine, "pool": pool}
                found = _rows(runs(one.batch, machine, pool, args.width), machine)
                rows += [{**what, "width": args.width, **row, **record()} for row in found]
                write_csv(file, rows)
    tables = (NAME, "planner_batches", "planner_batch_tokens") if file == NAME else (WIDE,)
    print(as_text(TABLES[name] for name in tables))
    return 0


def _rows(ordered: Iterable[OrderedRun], machine: str) -> list[dict[str, Any]]:
    """A row for each order."""
    seconds = MACHINES[machine][1]
    return [
        {
            "way": one.way,
            "capacity": round(one.capacity),
            "calls": one.num_calls,
            "seconds": round(one.ran.total * seconds, 2),
            "hit_rate": round(one.ran.hit_rate, 4),
            "best_hit_rate": round(one.best_hit_rate, 4),
            "batch": round(one.ran.mean(2), 2),
            "batch_tokens": round(one.ran.mean(3)),
        }
        for one in ordered
    ]


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Batches over time, by orders of the same calls: Figure 10 of *Helium*, by the model of an engine.

    python -m benchmarks.planner.pressure.course [--workflow trading ...] [--pool 0.5]
        [--width 256] [--parts 10]

Each order's time, which is its own, is divided into equal parts; of each part the mean number of
calls in a batch, and of tokens that they have in the KV cache, shared ones once.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.planner.pressure.simulate import MACHINES, runs
from benchmarks.planner.pressure.tables import COURSE, TABLES
from benchmarks.planner.rivals.workloads import NAMES, add_sizes, asked_workload
from vllm_choreo.planner.physical.pool import PoolRun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.set_defaults(queries=16, answer_tokens=100, words=400)
    parser.add_argument("--pool", type=float, default=0.5)
    parser.add_argument("--machine", choices=MACHINES, action="append")
    parser.add_argument("--width", type=int, default=256, help="calls at a time, at most")
    parser.add_argument("--parts", type=int, default=10)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.workflow or NAMES:
        name, one = asked_workload(name, args)
        for machine in args.machine or MACHINES:
            what: dict[str, Any] = {"workflow": name, "queries": args.queries, "machine": machine}
            what |= {"pool": args.pool, "width": args.width}
            for ordered in runs(one.batch, machine, args.pool, args.width):
                about = {**what, "way": ordered.way}
                rows += [{**about, **part} for part in course(ordered.ran, args.parts)]
    write_csv(COURSE, rows, **record())
    print(as_text([TABLES[f"{COURSE}_calls"], TABLES[f"{COURSE}_tokens"]]))
    return 0


def course(ran: PoolRun, num_parts: int) -> list[dict[str, Any]]:
    """Mean calls in a batch, and their tokens, in each part of a run's time."""
    length = ran.total / num_parts
    weighed = [[0.0, 0.0] for _ in range(num_parts)]
    for begin, duration, num_calls, num_tokens in ran.steps:
        first = min(int(begin / length), num_parts - 1)
        last = min(int((begin + duration) / length), num_parts - 1)
        for part in range(first, last + 1):
            inside = min(begin + duration, (part + 1) * length) - max(begin, part * length)
            weighed[part][0] += inside * num_calls
            weighed[part][1] += inside * num_tokens
    return [
        {"part": part, "batch": round(calls / length, 2), "batch_tokens": round(tokens / length)}
        for part, (calls, tokens) in enumerate(weighed)
    ]


if __name__ == "__main__":
    sys.exit(main())

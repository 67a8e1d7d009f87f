# SPDX-License-Identifier: Apache-2.0
"""How far choreographed plans are from the text, call by call and in what they answer.

    python -m benchmarks.planner.agreement [--workflow debate ...] [--queries 2] [--repair first:8]

Each workflow is run as text; then, with the text's tokens forced on every call, as a choreographed
plan, without and with repair. At each token the distributions over the whole vocabulary are
compared. Then the plan answers freely, and its results are compared with the text's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.harness.engine import FORCED, set_environment, start_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.planner.agreement.measure import compare_calls, compare_results, run_plan
from benchmarks.planner.agreement.tables import FREE, NAME, TABLES
from benchmarks.planner.rivals.workloads import NAMES, add_sizes, asked_workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.set_defaults(queries=2)
    parser.add_argument("--repair", action="append", help="rules, beside none")
    args = parser.parse_args()
    set_environment()
    llm = start_engine(logits_processors=[FORCED])
    rows: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    for name in args.workflow or NAMES:
        name, one = asked_workload(name, args)
        batch = one.batch
        text, results = run_plan(llm, batch, "baseline")
        what = {"workflow": name, "queries": args.queries}
        for rule in [None, *(args.repair or ["first:8"])]:
            way = {**what, "way": f"choreographed, {rule or 'no repair'}"}
            rows += [{**way, **row} for row in compare_calls(llm, batch, text.answered, rule)]
            free += [{**way, **row} for row in compare_results(llm, batch, results, rule)]
            write_csv(NAME, rows, **record())
            write_csv(FREE, free, **record())
    print(as_text(TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

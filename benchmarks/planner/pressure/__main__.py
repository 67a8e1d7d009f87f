# SPDX-License-Identifier: Apache-2.0
"""Hit rates, times and batches of orders of the same calls, by the model of an engine.

    python -m benchmarks.planner.pressure [--workflow debate ...] [--queries 16] [--pools 1.2 0.5]
        [--add]

The model of an engine (`planner/physical/pool.py`) runs the calls of a workflow as text over a
prefix cache, in pools that hold all its prompts and answers or a part of them; nothing is merged,
kept or encoded before, so that the order alone is compared. `least` is the share of prompt tokens
that the best order could have found.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.planner.pressure.orders import ORDERS
from benchmarks.planner.pressure.tables import NAME, TABLES
from benchmarks.planner.rivals.workloads import NAMES, add_sizes, asked_workload
from vllm_choreo.planner import CompiledGraph, CostModel, EngineModel, Profile
from vllm_choreo.planner.physical.pool import ModelEngine, least_encoded, working_set
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Plan, Target

# Steps in the time of encoding one token, and seconds of that time. Assumed: weights of an 8B model
# are 16 GB, which 3.3 TB/s read once a step, and 600 TFLOP/s encode; the small model encodes a
# token in 1.7 ms here, and with 16 calls decodes about 350 tokens a second.
MACHINES = {
    "8B, one H100": (EngineModel(0.0, step=200.0, decode=1.0), 3.0e-5),
    "135M, two cores": (EngineModel(0.0, step=4.0, decode=2.5), 1.7e-3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.set_defaults(queries=16, answer_tokens=100, words=400)
    parser.add_argument("--pools", type=float, nargs="+", default=[1.2, 0.5, 0.25, 0.1])
    parser.add_argument("--machine", choices=MACHINES, action="append")
    parser.add_argument("--add", action="store_true", help="to the rows of earlier runs")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [*read_csv(NAME)] if args.add else []
    for name in args.workflow or NAMES:
        name, one = asked_workload(name, args)
        for machine in args.machine or MACHINES:
            for pool in args.pools:
                what = {"workflow": name, "queries": args.queries, "machine": machine, "pool": pool}
                rows += [{**what, **row, **record()} for row in _rows(one.batch, machine, pool)]
                write_csv(NAME, rows)
    print(as_text(TABLES.values()))
    return 0


def _rows(batch: CompiledGraph, machine: str, share: float) -> list[dict[str, Any]]:
    """A row for each order, in a pool that holds this share of all prompts and answers."""
    given, seconds = MACHINES[machine]
    plain = _planned(batch, None)
    calls = plain.calls
    largest = max(calls.tree.total(call) + calls.num_out[call] for call in calls.num_out)
    model = replace(given, capacity=max(share * working_set(calls), 2 * largest))
    plans = {**dict.fromkeys(ORDERS, plain), "plan, in blocks": _planned(batch, model)}
    best = 1.0 - least_encoded(calls) / sum(calls.tree.total(call) for call in calls.num_out)
    rows = []
    for way, plan in plans.items():
        choose = ORDERS.get(way, ORDERS["plan"])(plan)
        ran = ModelEngine(plan.calls, model).run(choose)
        rows.append(
            {
                "way": way,
                "capacity": round(model.capacity),
                "calls": len(calls.num_out),
                "seconds": round(ran.total * seconds, 2),
                "hit_rate": round(ran.hit_rate, 4),
                "best_hit_rate": round(best, 4),
                "batch": round(ran.mean(2), 2),
                "batch_tokens": round(ran.mean(3)),
            }
        )
    return rows


def _planned(batch: CompiledGraph, model: EngineModel | None) -> Plan:
    """A plan that knows how long answers are, and what its engine holds."""
    profile = Profile()
    for node in batch.graph.nodes:
        if node.kind == "llm":
            profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
    without = frozenset({"merge"})
    return make_plan(batch, Target(cost=CostModel(engine=model), profile=profile, without=without))


if __name__ == "__main__":
    sys.exit(main())

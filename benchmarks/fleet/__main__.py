# SPDX-License-Identifier: Apache-2.0
"""Placement over many engines, simulated: ours, prefixes with affinity, two choices, an oracle.

python -m benchmarks.fleet [--engines 10 100] [--sessions-per-engine 1000] [--policies ours oracle]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.simulate import Simulation
from benchmarks.fleet.tables import TABLES
from benchmarks.fleet.workload import Workload
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text

_ORDER = list(POLICIES).index
_DOCUMENTS_PER_ENGINE = 200
# Sessions that begin at an engine in a second: the oracle's engines are then busy half the time.
_PER_SECOND = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--sessions-per-engine", type=int, default=1000)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--per-second", type=float, default=_PER_SECOND)
    parser.add_argument("--add", action="store_true", help="keep the rows of other runs")
    args = parser.parse_args()
    # What is made here is freed by counts: looking for cycles among 1,000,000 sessions is in vain.
    gc.disable()
    if not args.add:
        write_csv("fleet", [])
    for num_engines in args.engines:
        for name in args.policies:
            began = time.perf_counter()
            workload = Workload(0, _DOCUMENTS_PER_ENGINE * num_engines)
            policy = POLICIES[name](num_engines)
            simulation = Simulation(policy, workload, args.per_second * num_engines)
            row = {"policy": name, **simulation.run(args.sessions_per_engine * num_engines)}
            print(row, f"{time.perf_counter() - began:.0f} s", flush=True)
            _add({**row, **record()})
    print(as_text([TABLES["fleet"]]))
    return 0


def _add(row: Mapping[str, Any]) -> None:
    """Write a row beside those that are there, in place of one of the same policy and size."""
    is_same = ("policy", "engines")
    rest = [r for r in read_csv("fleet") if any(r[key] != str(row[key]) for key in is_same)]
    write_csv("fleet", sorted([*rest, row], key=lambda r: (int(r["engines"]), _ORDER(r["policy"]))))


if __name__ == "__main__":
    sys.exit(main())

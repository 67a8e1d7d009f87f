# SPDX-License-Identifier: Apache-2.0
"""Attention over messages that many calls read: together, each alone, and what planning costs.

    python -m benchmarks.attention.shared_reading [--rounds 9] [--passes 2]

No engine: `ops.span_attention` on caches of several layers, as large together as a model's, so that
a layer's keys and values are not left in the CPU's cache by the step before. Sides take turns, and
outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.attention.shared_work import in_turn_row, make_work, measure, planning_times
from benchmarks.attention.tables import TABLES
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text

HEADS = [(9, 3, 64), (32, 8, 128)]  # query heads, KV heads, head size: SmolLM2-135M, Llama-3.1-8B
# Readers, tokens of all messages, heads.
SHAPES = [(n, 4000, *heads) for heads in HEADS for n in (2, 4, 8, 16, 32)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        for shape in SHAPES:
            rows.append({"pass": number, **_row(shape, args.rounds)})
            print(rows[-1], flush=True)
    write_csv("shared_reading", rows, **record())
    plans = [{"pass": n, **planning_times(31)} for n in range(1, args.passes + 1)]
    write_csv("shared_reading_planning", plans, **record())
    print(as_text(TABLES[name] for name in ("shared_reading", "shared_reading_planning")))
    return 0


def _row(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    readers, tokens, heads, kv_heads, size = shape
    seconds = measure(make_work(*shape), rounds)
    together = statistics.median(seconds["together"])
    return {
        "readers": readers,
        "tokens": tokens,
        "heads": f"{heads}/{kv_heads}x{size}",
        **in_turn_row(seconds),
        "gflops": round(4e-9 * readers * heads * size * tokens / together, 1),
        "gb_s": round(8e-9 * tokens * kv_heads * size / together, 2),
    }


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Reading a message at another position: turning queries, keys in place, or keys in a copy.

    python -m benchmarks.policies [--long] [--passes 2]

One engine serves both policies, which take turns over patterns of positions. Before a pattern is
timed, both must give the same log-probabilities. Then what one repositioned message adds to a
decode step under "query", and what many moves in place do to keys in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.engine import kv_block_bytes, start_choreo_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.stats import median
from benchmarks.harness.steps import read_bandwidth
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.policies import drift
from benchmarks.policies.bars import added_share, bar_reached
from benchmarks.policies.patterns import PATTERNS, POLICIES, Pattern
from benchmarks.policies.picture import draw_drift
from benchmarks.policies.reading import MESSAGE_TOKENS, Reading
from benchmarks.policies.tables import TABLES

READERS = (1, 8, 16)


def main() -> int:
    args = _arguments()
    llm = start_choreo_engine(
        kv_cache_gib=4,
        max_model_len=MESSAGE_TOKENS + 1024,
        max_num_seqs=2 * max(READERS),
        hf_overrides={"max_position_embeddings": MESSAGE_TOKENS + 1024},
        additional_config={"choreo": {"reposition": "in_place"}},
    )
    bench = Reading(llm)
    calls: list[dict[str, Any]] = []
    shares: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        calls += _patterns(bench, number, args.repeats)
        shares += _repositioned(bench, number, args.pairs)
    speeds = {
        "memory_bytes_per_s": round(read_bandwidth(1 << 30)),
        "block_bytes": kv_block_bytes(llm),
    }
    write_csv("policies", calls, **speeds, **record())
    write_csv("policies_repositioned", shares, **record())
    drifts = drift.measure(args.seeds)
    write_csv("policies_drift", drifts, **record())
    draw_drift(drifts)
    print(as_text(TABLES.values()))
    return int(not bar_reached(shares))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="more repeats")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="of each pattern, per pass")
    parser.add_argument("--pairs", type=int, help="of steps' medians, per pass")
    parser.add_argument("--seeds", type=int, default=5, help="of the random caches that drift")
    args = parser.parse_args()
    args.repeats = args.repeats or (6 if args.long else 1)
    args.pairs = args.pairs or (40 if args.long else 6)
    return args


def _patterns(bench: Reading, number: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for pattern in PATTERNS:
        if number == 1:
            bench.check(pattern)
        for repeat in range(repeats):
            for policy in in_turn(POLICIES, number + repeat):
                bench.go_home()
                for i, distances in enumerate(pattern.distances):
                    found = bench.call(policy, distances)
                    steps = found.pop("steps")
                    del found["logprobs"]
                    rows.append(
                        {
                            "pass": number,
                            "repeat": repeat,
                            "pattern": pattern.name,
                            "policy": policy,
                            "call": i,
                            "readers": len(distances),
                            **found,
                            "step_s": round(median(steps), 6),
                        }
                    )
        print(f"pass {number}: {pattern.title}: {_in_words(rows, pattern)}", flush=True)
    return rows


def _in_words(rows: Sequence[Mapping[str, Any]], pattern: Pattern) -> str:
    words = []
    for policy in POLICIES:
        ttfts = [r["ttft_s"] for r in rows if (r["pattern"], r["policy"]) == (pattern.name, policy)]
        words.append(f"{policy} {1e3 * median(ttfts):.1f} ms to first token")
    return ", ".join(words)


def _repositioned(bench: Reading, number: int, pairs: int) -> list[dict[str, Any]]:
    """Decode steps of readers at other positions beside those at the message's own, in turn."""
    rows = []
    bench.go_home()
    for readers in READERS:
        sides = {"own": (0,) * readers, "repositioned": tuple(range(1, readers + 1))}
        for pair in range(pairs):
            for side in in_turn(list(sides), number + pair):
                steps = bench.call("query", sides[side])["steps"]
                rows.append(
                    {
                        "pass": number,
                        "pair": pair,
                        "readers": readers,
                        "side": side,
                        "step_s": round(median(steps), 7),
                    }
                )
        share = added_share(rows, readers, number)
        print(f"pass {number}: {readers} readers: repositioned costs {share:+.2%}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Reading a message at another position: turning queries, keys in place, or keys in a copy.

    python -m benchmarks.bench_policies [--long] [--passes 2]

One engine serves both policies, which take turns over patterns of positions. Before a pattern is
timed, both must give the same log-probabilities. Then what one repositioned message adds to a
decode step under "query", and what many moves in place do to keys in bfloat16.

A position is a distance here: scores depend on how far the reader is behind the message alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import drift, policies_page
from benchmarks.common import (
    command_line,
    forced,
    kv_block_bytes,
    machine,
    median,
    only_token,
    runner_of,
    scheduler_of,
    set_environment,
    start_engine,
    write_csv,
)
from benchmarks.steps import StepWatch, read_bandwidth, used_blocks

POLICIES = ("query", "in_place")
MESSAGE_TOKENS = 4000  # whole blocks: unpadded, so that its own place is a distance of 0
CALLS = 5  # of a pattern, one after the other
ANSWER_TOKENS = 8
READERS = (1, 8, 16)
TOLERANCE = 1e-3  # of log-probabilities in float32


@dataclass(frozen=True)
class Pattern:
    """Distances of the readers, call by call; readers of one call run in parallel."""

    name: str
    title: str
    distances: tuple[tuple[int, ...], ...]


PATTERNS = (
    Pattern("own", "one reader, where the message was encoded", ((0,),) * CALLS),
    Pattern("again", "one reader, one new position again and again", ((100,),) * CALLS),
    Pattern("alternate", "readers alternate between two positions", ((100,), (300,)) * CALLS),
    Pattern("together", "8 readers at once, each at its own", (tuple(range(100, 900, 100)),) * 3),
    Pattern("all own", "8 readers at once, where it was encoded", ((0,) * 8,) * 3),
)


def main() -> int:
    args = _arguments()
    set_environment(kv_cache_gib=4)
    import vllm_choreo

    vllm_choreo.register()
    llm = start_engine(
        max_model_len=MESSAGE_TOKENS + 1024,
        max_num_seqs=2 * max(READERS),
        hf_overrides={"max_position_embeddings": MESSAGE_TOKENS + 1024},
        additional_config={"choreo": {"reposition": "in_place"}},
    )
    bench = _Bench(llm)
    calls: list[dict[str, Any]] = []
    shares: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        calls += _patterns(bench, number, args.repeats)
        shares += _repositioned(bench, number, args.pairs)
    record = {**machine(), "command": command_line("bench_policies")}
    speeds = {
        "memory_bytes_per_s": round(read_bandwidth(1 << 30)),
        "block_bytes": kv_block_bytes(llm),
    }
    write_csv("policies", calls, **speeds, **record)
    write_csv("policies_repositioned", shares, **record)
    write_csv("policies_drift", drift.measure(args.seeds), **record)
    print(section())
    return int(not policies_page.bar_reached(shares))


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    return policies_page.section()


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


class _Bench:
    """The engine, its two policies, and the message that is read."""

    def __init__(self, llm: Any) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.c = Choreography(llm)
        self._mover = scheduler_of(llm).mover
        tokens = [1000 + i * 7919 % 40000 for i in range(MESSAGE_TOKENS)]
        self.message = self.c.prefill(tokens)

    def _switch(self, policy: str) -> None:
        """What `ChoreoConfig.reposition` decides when an engine starts; between calls."""
        scheduler = scheduler_of(self.llm)
        mover = self._mover if policy == "in_place" else None
        scheduler.mover = scheduler.kv_cache_manager.mover = mover

    def call(self, policy: str, distances: Sequence[int], **options: Any) -> dict[str, Any]:
        """One reader per distance, in parallel; what it took and moved."""
        self._switch(policy)
        calls = [
            {
                "header": list(range(500, 508)),
                "parents": [self.message],
                "new_offset": MESSAGE_TOKENS + distance,
            }
            for distance in distances
        ]
        params = forced(self.llm, ANSWER_TOKENS, **options)
        before = used_blocks(scheduler_of(self.llm))
        with StepWatch(self.llm) as watch, _moves(self.llm) as moves:
            answers = self.c.decode(calls, sampling_params=params)
        self.c.free(*answers)
        return {
            "ttft_s": round(median(answer.metrics.ttft for answer in answers), 6),
            "steps": watch.decode_seconds(len(distances)),
            "blocks": watch.peak_blocks() - before,
            **moves,
            "logprobs": [answer.logprobs for answer in answers],
        }

    def go_home(self) -> None:
        """Let the message lie where it was encoded, wherever it was moved to."""
        self.call("in_place", (0,))

    def check(self, pattern: Pattern) -> None:
        """Both policies must say the same."""
        found = []
        for policy in POLICIES:
            self.go_home()
            calls = [self.call(policy, d, logprobs=1)["logprobs"] for d in pattern.distances]
            steps = itertools.chain(*itertools.chain(*calls))
            found.append([step[only_token(self.llm)].logprob for step in steps])
        worst = max(abs(a - b) for a, b in zip(*found, strict=True))
        print(f"{pattern.name}: log-probabilities within {worst:.1e}", flush=True)
        if worst > TOLERANCE:
            raise SystemExit(f"{pattern.name}: the policies differ by {worst}: nothing timed")


@contextmanager
def _moves(llm: Any) -> Iterator[dict[str, Any]]:
    """Counts blocks whose keys are moved, in place and into copies, and the seconds it takes."""
    runner = runner_of(llm)
    move_keys = runner._move_keys
    found = {"in_place_blocks": 0, "copied_blocks": 0, "move_s": 0.0}

    def watched(moves: Any) -> None:
        start = time.perf_counter()
        move_keys(moves)
        found["move_s"] = round(found["move_s"] + time.perf_counter() - start, 6)
        found["in_place_blocks"] += sum(move.src == move.dst for move in moves)
        found["copied_blocks"] += sum(move.src != move.dst for move in moves)

    runner._move_keys = watched
    try:
        yield found
    finally:
        del runner._move_keys


def _patterns(bench: _Bench, number: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for pattern in PATTERNS:
        if number == 1:
            bench.check(pattern)
        for repeat in range(repeats):
            for policy in POLICIES if (number + repeat) % 2 else POLICIES[::-1]:
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


def _repositioned(bench: _Bench, number: int, pairs: int) -> list[dict[str, Any]]:
    """Decode steps of readers at other positions beside those at the message's own, in turn."""
    rows = []
    bench.go_home()
    for readers in READERS:
        sides = {"own": (0,) * readers, "repositioned": tuple(range(1, readers + 1))}
        for pair in range(pairs):
            for side in sides if (number + pair) % 2 else list(sides)[::-1]:
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
        share = policies_page.added_share(rows, readers, number)
        print(f"pass {number}: {readers} readers: repositioned costs {share:+.2%}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())

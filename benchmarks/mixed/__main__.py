# SPDX-License-Identifier: Apache-2.0
"""Ordinary requests beside choreographed calls, in the same batches.

    python -m benchmarks.mixed [--long] [--passes 2]

A closed loop: as many slots as there are, each submits its next request when its last one has
ended. Half of them hold ordinary requests. The other half holds choreographed calls on one side,
and on the other ordinary calls of the same work: as many new tokens after a cached prefix as long
as the messages. Lengths are drawn from a seed and are the same on both sides.

Then what it costs ordinary requests that a batch with one choreographed call in it runs through
our attention kernel, and not through vLLM's.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine import forced, start_choreo_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.stats import median
from benchmarks.harness.steps import StepWatch
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.mixed.bars import bar_reached, in_words, steps_in_words
from benchmarks.mixed.load import Load
from benchmarks.mixed.picture import draw
from benchmarks.mixed.tables import TABLES
from benchmarks.mixed.work import SIDES, SLOTS


def main() -> int:
    args = _arguments()
    llm = start_choreo_engine(kv_cache_gib=4, max_num_seqs=64, max_num_batched_tokens=2048)
    bench = Load(llm)
    bench.check_outputs()
    for side in SIDES:
        bench.run(side, 2 * SLOTS, seed=0)  # what is done once only shall not be timed
    requests: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        for turn in range(args.turns):
            for side in in_turn(SIDES, number + turn):
                for row in bench.run(side, args.requests, seed=turn):
                    requests.append({"pass": number, "turn": turn, "side": side, **row})
            print(f"pass {number} turn {turn}: {in_words(requests)}", flush=True)
        steps += _kernels(bench, number, args.repeats)
    write_csv("mixed", requests, **record())
    write_csv("mixed_steps", steps, **record())
    draw(requests)
    print(as_text(TABLES[name] for name in ("mixed", "mixed_steps")))
    return int(not bar_reached(requests))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="more requests and repeats")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--turns", type=int, help="of each side, per pass")
    parser.add_argument("--requests", type=int, default=32, help="ordinary ones, per turn")
    parser.add_argument("--repeats", type=int, help="of each batch for the kernels, per pass")
    args = parser.parse_args()
    args.turns = args.turns or (8 if args.long else 1)
    args.repeats = args.repeats or (15 if args.long else 2)
    return args


# -- one choreographed call in the batch -----------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Ordinary requests that run beside one small call."""

    title: str
    num_requests: int
    prompt_tokens: int
    is_decode: bool


BATCHES = (
    Batch("8 requests of 100 tokens decode", 8, 100, True),
    Batch("8 requests of 1,000 tokens decode", 8, 1000, True),
    Batch("a prompt of 100 tokens is prefilled", 1, 100, False),
    Batch("a prompt of 1,000 tokens is prefilled", 1, 1000, False),
)


def _kernels(bench: Load, number: int, repeats: int) -> list[dict[str, Any]]:
    """Steps of ordinary requests beside one call that reads 512 tokens, or a prefix as long."""
    rows = []
    for batch in BATCHES:
        _seconds_beside(bench, SIDES[1], batch)  # from now on vLLM has cached what decodes
        for repeat in range(repeats):
            for side in in_turn(SIDES, number + repeat):
                seconds = _seconds_beside(bench, side, batch)
                row = {"pass": number, "repeat": repeat, "batch": batch.title, "side": side}
                rows.append({**row, "step_s": round(seconds, 6)})
        print(f"pass {number}: {batch.title}: {steps_in_words(rows, batch.title)}",
              flush=True)  # fmt: skip
    return rows


def _seconds_beside(bench: Load, side: str, batch: Batch) -> float:
    """Of a decode step of the batch and the call; or from a prompt to its first token."""
    decode_tokens = 16
    ids = [bench.submit_reader(side, range(700, 716), bench.messages[:1], forced(bench.llm, 99))]
    bench.engine.step()
    # A prompt to prefill must be new each time; those that only decode may be cached.
    firsts = [2000 + i if batch.is_decode else bench.new_token() for i in range(batch.num_requests)]
    params = forced(bench.llm, decode_tokens if batch.is_decode else 1)
    start = time.perf_counter()
    for first in firsts:
        ids.append(bench.submit([first, *range(3000, 2999 + batch.prompt_tokens)], params))
    num_open = batch.num_requests
    with StepWatch(bench.llm) as watch:
        while num_open:
            num_open -= sum(output.finished for output in bench.engine.step())
    seconds = time.perf_counter() - start
    bench.engine.abort_request(ids)
    bench.drain()
    bench.forget()
    return median(watch.decode_seconds(len(ids))) if batch.is_decode else seconds


if __name__ == "__main__":
    sys.exit(main())

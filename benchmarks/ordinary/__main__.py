# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs ordinary requests: vLLM with it, without it, and at its own block size.

    python -m benchmarks.ordinary [--turns 5] [--passes 2]

The plugin must be absent from its rivals, so each side is a process. All of them are up at once
and take turns, one batch each; whoever is not at turn sleeps. Processes on one machine differ by a
tenth either way, with and without the plugin alike: each pass takes new ones, and the bar is for
the median of the passes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.child import Child
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.ordinary import engine
from benchmarks.ordinary.bars import bar_reached
from benchmarks.ordinary.tables import TABLES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="batches per side and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=12)
    args = parser.parse_args()
    rows = [row for n in range(1, args.passes + 1) for row in _pass(n, args)]
    write_csv("ordinary", rows, **record())
    print(as_text(TABLES.values()))
    return int(not bar_reached(rows))


def _pass(number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        children = {
            side: stack.enter_context(
                Child.of(engine.__name__, side, str(args.requests), VLLM_PLUGINS=plugins)
            )
            for side, (_, plugins) in engine.SIDES.items()
        }
        for child in children.values():
            child.ask("warm")
        expected = {side: child.ask("tokens")["tokens"] for side, child in children.items()}
        if expected["plugin"] != expected["stock"]:
            raise SystemExit("plugin and stock vLLM generate different tokens: nothing timed")
        rows = []
        for turn in range(args.turns):
            for side in in_turn(list(children), turn):
                answer = children[side].ask("time")
                if answer["tokens"] != expected[side]:
                    raise SystemExit(f"{side} generated other tokens than before")
                rows.append(_row(number, turn, side, answer, expected["stock"]))
                print(f"pass {number} turn {turn} {side}: {answer['seconds']:.2f} s", flush=True)
        return rows


def _row(
    number: int, turn: int, side: str, answer: Mapping[str, Any], stock: Sequence[Any]
) -> dict[str, Any]:
    generated = sum(map(len, answer["tokens"]))
    total = generated + answer["prompt_tokens"]
    return {
        "pass": number,
        "turn": turn,
        "side": side,
        "block_size": answer["block_size"],
        "seconds": round(answer["seconds"], 4),
        "prompt_tokens": answer["prompt_tokens"],
        "generated_tokens": generated,
        "longest_answer": max(map(len, answer["tokens"])),
        "tokens_per_s": round(total / answer["seconds"], 2),
        "same_tokens_as_stock": sum(a == b for a, b in zip(answer["tokens"], stock, strict=True)),
        "requests": len(stock),
    }


if __name__ == "__main__":
    sys.exit(main())

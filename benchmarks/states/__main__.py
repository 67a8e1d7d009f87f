# SPDX-License-Identifier: Apache-2.0
"""Models with states in place of keys: exact chains against vLLM's prefix caching.

    python -m benchmarks.states [--turns 20] [--passes 2]

A Mamba2 hybrid of random weights answers an agent's turns of 100 to 400 tokens, each behind all
that was said: as a chain of messages, and as text over the prefix cache of vLLM without the plugin,
which keeps states at ends of its blocks alone. Then ordinary requests, with the plugin and without.
Each side is a process; both are up at once and take turns. Before anything is timed, greedy tokens
of both are compared; in what is timed every answer is given, so that the texts are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.states import engine
from benchmarks.states.bars import bars_reached
from benchmarks.states.sides import Tokens, draw_tokens, open_sides
from benchmarks.states.tables import CHAIN_TABLES

KV_HEADS = (2, 1)  # of models; the fewer, the larger a block of vLLM's prefix cache
TURN_TOKENS = (100, 400)
# Tokens with which all prompts of a batch begin: none, and more than two blocks of a prefix cache.
BEGINNINGS = (0, 1400)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help="of a conversation; 0: none")
    parser.add_argument("--passes", type=int, default=2, help="each with processes of its own")
    parser.add_argument("--requests", type=int, default=12, help="ordinary ones in a batch")
    parser.add_argument("--batches", type=int, default=5, help="per side and pass")
    args = parser.parse_args()
    conversations: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = [engine.make_model(Path(folder, str(n)), n) for n in KV_HEADS]
        for number in range(1, args.passes + 1):
            for model in models:
                with open_sides(model, engine.SIDES) as sides:
                    _check(sides)
                    if args.turns:
                        conversations += _conversations(sides, number, args.turns)
                    if model == models[0]:
                        batches += _batches(sides, number, args)
    if args.turns:
        write_csv("states", conversations, **record())
    write_csv("states_ordinary", batches, **record())
    print(as_text(CHAIN_TABLES.values()))
    return int(not bars_reached(conversations or read_csv("states"), batches))


def _check(sides: dict[str, Child]) -> None:
    """Raises SystemExit: chain and text differ in a greedy token, or the chain reused nothing."""
    turns = _turns(-1, 4)
    chain = _converse(sides["plugin"], turns, "choreo", is_forced=False)
    text = _converse(sides["stock"], turns, "baseline", is_forced=False)
    if [row["tokens"] for row in chain] != [row["tokens"] for row in text]:
        raise SystemExit("chain and text differ: nothing timed")
    if not all(row["is_exact"] for row in chain) or not chain[-1]["reused_tokens"]:
        raise SystemExit("a chain that is not exact, or reuses nothing: nothing timed")
    print("chain of messages = plain text: same greedy tokens", flush=True)


def _converse(side: Child, turns: list[Tokens], mode: str, is_forced: bool) -> list[dict[str, Any]]:
    asked = {"do": "conversation", "turns": turns, "mode": mode, "is_forced": is_forced}
    rows: list[dict[str, Any]] = side.ask(asked)
    return rows


def _conversations(sides: dict[str, Child], number: int, num_turns: int) -> list[dict[str, Any]]:
    """One conversation; who is first changes from pass to pass."""
    turns = _turns(number, num_turns)
    ways = {"chain": (sides["plugin"], "choreo"), "stock": (sides["stock"], "baseline")}
    found = {way: _converse(*_asked(ways[way], turns)) for way in in_turn([*ways], number)}
    lengths = _text_lengths(turns)
    block_size = sides["stock"].ask({"do": "block_size"})
    return [
        {
            "pass": number,
            "block_size": block_size,
            "turn": turn,
            "side": way,
            "new_tokens": len(turns[turn]),
            "text_tokens": lengths[turn],
            "reused_tokens": row["reused_tokens"],
            "stock_reused_tokens": found["stock"][turn]["reused_tokens"],
            "first_token_s": round(row["first_token_s"], 5),
        }
        for way, rows in found.items()
        for turn, row in enumerate(rows)
    ]


def _asked(way: tuple[Child, str], turns: list[Tokens]) -> tuple[Child, list[Tokens], str, bool]:
    child, mode = way
    return child, turns, mode, True


def _text_lengths(turns: Sequence[Tokens]) -> list[int]:
    """Tokens of the whole text at each turn, answers before it included."""
    lengths, said = [], 0
    for turn in turns:
        lengths.append(said + len(turn))
        said += len(turn) + engine.ANSWER_TOKENS
    return lengths


def _batches(
    sides: dict[str, Child], number: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Batches of ordinary requests; what a warm one is asked begins as the one before."""
    rows = []
    for beginning in BEGINNINGS:
        rng = random.Random(f"{number} {beginning}")
        start = draw_tokens(rng, beginning)
        for turn in range(args.batches):
            for is_warm in (False, True) if beginning else (False,):
                prompts = [
                    start + draw_tokens(rng, rng.randint(50, 300)) for _ in range(args.requests)
                ]
                asked = {"do": "batch", "prompts": prompts, "is_warm": is_warm}
                found = {name: sides[name].ask({**asked}) for name in in_turn([*sides], turn)}
                if found["plugin"]["tokens"] != found["stock"]["tokens"]:
                    raise SystemExit("the plugin generated other tokens than stock vLLM")
                num_tokens = sum(map(len, (*prompts, *found["stock"]["tokens"])))
                rows += [
                    {
                        "pass": number,
                        "turn": turn,
                        "side": name,
                        "shared_tokens": beginning,
                        "is_warm": int(is_warm),
                        "cached_tokens": answer["cached_tokens"],
                        "tokens_per_s": round(num_tokens / answer["seconds"], 1),
                    }
                    for name, answer in found.items()
                ]
    return rows


def _turns(seed: int, num_turns: int) -> list[Tokens]:
    rng = random.Random(seed)
    return [draw_tokens(rng, rng.randint(*TURN_TOKENS)) for _ in range(num_turns)]


if __name__ == "__main__":
    sys.exit(main())

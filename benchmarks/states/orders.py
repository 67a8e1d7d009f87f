# SPDX-License-Identifier: Apache-2.0
"""Models with states that read documents in any order: composition against vLLM's prefix caching.

    python -m benchmarks.states.orders [--documents 8] [--readers 16] [--passes 2]

Readers ask about the same documents, each in an order of its own: composed of messages that were
encoded alone, and as text over the prefix cache of vLLM without the plugin, which no order shares
with another. Both sides are processes, up at once, and take turns; ordinary requests of both are
compared before anything is timed, and every answer is given. Then, with the plugin alone, how far
what is read so is from the text: KL per token of the question, of the hybrid and of a model of the
same shape with attention in all layers. The weights are random: that says how much of the text's
numbers is left, and nothing of the quality of a trained model's answers.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.states import engine
from benchmarks.states.sides import draw_tokens, open_sides
from benchmarks.states.tables import ORDER_TABLES

_MODES = {"composed": "choreo", "stock": "baseline"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300, help="of a document")
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--passes", type=int, default=2, help="each with processes of its own")
    parser.add_argument("--turns", type=int, default=3, help="per side and pass")
    parser.add_argument("--judged", type=int, default=8, help="questions whose KL is measured")
    args = parser.parse_args()
    timed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        hybrid = engine.make_model(Path(folder))
        for number in range(1, args.passes + 1):
            with open_sides(hybrid, engine.ORDER_SIDES) as sides:
                _check_ordinary(sides)
                timed += _time(sides, number, args)
        dense = engine.make_dense_model(Path(folder))
        judged = [
            *_judge("hybrid", "composed", hybrid, args),
            *_judge("dense", engine.DENSE, dense, args),
        ]
    write_csv("states_orders", timed, **record())
    write_csv("states_quality", judged, **record())
    print(as_text(ORDER_TABLES.values()))
    return 0


def _check_ordinary(sides: dict[str, Child]) -> None:
    """Raises SystemExit: ordinary requests of the sides differ in a greedy token."""
    rng = random.Random(0)
    prompts = [draw_tokens(rng, rng.randint(50, 700)) for _ in range(4)]
    asked = {"do": "batch", "prompts": prompts, "is_warm": False}
    found = [side.ask(dict(asked))["tokens"] for side in sides.values()]
    if found[0] != found[1]:
        raise SystemExit("ordinary requests differ: nothing timed")
    print("ordinary requests with the plugin = without: same greedy tokens", flush=True)


def _time(sides: dict[str, Child], number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for turn in range(args.turns):
        work = _work(f"{number} {turn}", args, args.readers)
        for name in in_turn([*sides], turn):
            found = sides[name].ask({"do": "readers", **work, "mode": _MODES[name]})
            if name == "composed" and {*found["reused_tokens"]} != {args.documents * args.tokens}:
                raise SystemExit("a reader that has not reused all documents")
            rows.append(
                {
                    "pass": number,
                    "turn": turn,
                    "side": name,
                    "documents": args.documents,
                    "document_tokens": args.tokens,
                    "readers": args.readers,
                    "reused_tokens": sum(found["reused_tokens"]),
                    "documents_s": round(found["documents_s"], 4),
                    "readers_s": round(found["readers_s"], 4),
                    "all_s": round(found["documents_s"] + found["readers_s"], 4),
                    "first_token_s": round(max(found["first_token_s"]), 4),
                }
            )
    return rows


def _judge(kind: str, side: str, model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    work = _work("judged", args, args.judged)
    with Child.of(engine.__name__, side, str(model), VLLM_PLUGINS="choreo") as child:
        found = child.ask({"do": "divergence", **work})
    return [
        {
            "model": kind,
            "question": number,
            "documents": args.documents,
            "document_tokens": args.tokens,
            "kl_per_token": round(kl, 6),
        }
        for number, kl in enumerate(found)
    ]


def _work(seed: str, args: argparse.Namespace, num_questions: int) -> dict[str, Any]:
    """Documents, and questions behind all of them in random orders."""
    rng = random.Random(seed)
    numbers = range(args.documents)
    return {
        "documents": [draw_tokens(rng, args.tokens) for _ in numbers],
        "orders": [rng.sample(numbers, args.documents) for _ in range(num_questions)],
        "questions": [draw_tokens(rng, 24) for _ in range(num_questions)],
    }


if __name__ == "__main__":
    sys.exit(main())

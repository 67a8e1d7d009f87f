# SPDX-License-Identifier: Apache-2.0
"""Does what Alice keeps to herself change what Bob does? The paper's tables 3 and 6, and figure 8.

    python -m benchmarks.paper.dilemma [--model MODEL] [--games 100] [--max-tokens 96] [--predict]

Every game is played as text, then choreographed with the same plans and free talk, once for each
context that an utterance may carry. Half of the games begin with Alice, half with Bob. With
`--predict` Bob says what Alice will do before he decides. Rates are shares of games; an interval of
a difference resamples games, of which both sides are taken together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.paper.picture import draw
from benchmarks.paper.tables import DILEMMA, TABLES, TEXT
from vllm_choreo.api.protocol import Facade
from vllm_choreo.cli.chat_turns import turns_of_model
from vllm_choreo.cli.engine import LocalEngine, start_engine
from vllm_choreo.lab.workflows.prisoners_dilemma import (
    LEAKS,
    NAMES,
    STRATEGIES,
    plans_of,
    prisoners_dilemma,
)
from vllm_choreo.lab.workflows.together import all_made, run_together
from vllm_choreo.transcript.transcript import Transcript

_TOGETHER = 8
_CONTEXT = 4096

Open = Callable[[str], AbstractContextManager[Facade]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the small test model")
    parser.add_argument("--games", type=int, default=100, help="of each strategy")
    parser.add_argument("--max-tokens", type=int, default=96, help="of a plan and an utterance")
    parser.add_argument("--predict", action="store_true", help="also what Bob expects of Alice")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    args = parser.parse_args()
    engine = LocalEngine(start_engine(args.model, _CONTEXT))
    common = {"turns": turns_of_model(args.model), "predict": args.predict}
    rows: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        games = [
            {"strategies": [strategy, "none"], **common, **_sampling(args, number)}
            for number in range(args.games)
        ]
        for row in played(engine.open, games):
            rows.append({"strategy": strategy, **row})
        print(f"{strategy}: {len(rows)} games", flush=True)
        write_csv(DILEMMA, rows, **record())
    draw(rows)
    print(as_text([TABLES["paper_dilemma"], TABLES["paper_prediction"]]))
    return 0


def _sampling(args: argparse.Namespace, number: int) -> dict[str, Any]:
    settings = {"temperature": args.temperature, "top_p": args.top_p, "seed": number}
    return {
        "sampling_params": LocalEngine.sampling(max_tokens=args.max_tokens, **settings),
        "decision_params": LocalEngine.sampling(max_tokens=8, **settings),
    }


def played(open_session: Open, games: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Play games as text, and again with each leak and the same plans; a row each.

    Args:
        open_session: opens a session of a mode.
        games: arguments of `prisoners_dilemma`.
    """
    games = [{"first": NAMES[i % 2], **game} for i, game in enumerate(games)]
    texts = _in_parts(open_session, "baseline", games)
    yield from _rows(TEXT, games, texts)
    for leak in LEAKS:
        again = [
            {**game, "leak": leak, "plans": plans_of(text)}
            for game, text in zip(games, texts, strict=True)
        ]
        yield from _rows(leak, again, _in_parts(open_session, "choreo", again))


def _in_parts(open_session: Open, mode: str, games: Sequence[dict[str, Any]]) -> list[Transcript]:
    """Play games, some of them side by side."""
    made: list[Transcript] = []
    for start in range(0, len(games), _TOGETHER):
        some = games[start : start + _TOGETHER]
        with open_session(mode) as c:
            made += all_made(run_together(c, [partial(prisoners_dilemma, **g) for g in some]))
    return made


def _rows(
    leak: str, games: Sequence[dict[str, Any]], transcripts: Sequence[Transcript]
) -> Iterator[dict[str, Any]]:
    for number, (game, transcript) in enumerate(zip(games, transcripts, strict=True)):
        alice, bob, *predicted = transcript.answers
        row = {"leak": leak, "game": number, "first": game["first"]}
        yield {**row, "alice": alice, "bob": bob, "predicted": "".join(predicted)}


if __name__ == "__main__":
    sys.exit(main())

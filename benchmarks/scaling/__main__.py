# SPDX-License-Identifier: Apache-2.0
"""How choreography scales with the tokens that calls share, and with the calls that share them.

    python -m benchmarks.scaling [--long] [--passes 2]

Time to first token, decode throughput and KV memory, against two baselines: the messages after a
role prompt of each reader's own, so that the texts share no prefix, and, harder, the messages as a
common prefix that vLLM has cached. One engine serves all sides, which take turns; every generated
token is forced to be the same. Before anything is timed, log-probabilities are compared where all
sides mean the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, start_choreo_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.scaling import rows as figures
from benchmarks.scaling.picture import draw_decode, draw_first_token
from benchmarks.scaling.readers import CHUNK_TOKENS, MESSAGE_TOKENS, Readers
from benchmarks.scaling.stock_prefix import StockPrefix
from benchmarks.scaling.tables import TABLES

READERS = (1, 2, 4, 8, 16, 32)
FIRST_TOKEN_SIDES = ("choreo", "prefix", "text")
DECODE_SIDES = ("grouped", "own orders", "ungrouped", "prefix", "no context")


def main() -> int:
    args = _arguments()
    longest = max(args.tokens)
    # Each message is padded to whole blocks; role, header and answer come on top.
    room = longest // MESSAGE_TOKENS * (-MESSAGE_TOKENS % BLOCK_SIZE) + 512
    # The model's weights are of no matter here, so it may read further than it was trained to.
    options: dict[str, Any] = {
        "max_model_len": longest + room,
        "max_num_seqs": 2 * max(READERS),
        "max_num_batched_tokens": CHUNK_TOKENS,
        "hf_overrides": {"max_position_embeddings": longest + room},
    }
    stock = StockPrefix(**options) if args.long else None
    llm = start_choreo_engine(kv_cache_gib=10 if args.long else 5, **options)
    bench = Readers(llm, stock, longest)
    bench.check_outputs()
    first, decode = [], []
    for number in range(1, args.passes + 1):
        first += _first_tokens(bench, number, args)
        decode += _decodes(bench, number, args)
    if stock:
        stock.close()
    write_csv("scaling_first_token", first, **record())
    write_csv("scaling_decode", decode, **record())
    speeds = bench.speeds()
    write_csv("scaling_machine", [speeds], **record())
    draw_first_token(first)
    draw_decode(first, decode, speeds)
    print(as_text(TABLES.values()))
    return int(not figures.bars_reached(decode))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="more of all, and stock vLLM")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="of what takes no long prefill; per pass")
    parser.add_argument("--tokens", type=int, nargs="+", help="shared, with one reader")
    parser.add_argument("--reader-tokens", type=int, help="shared, with several readers")
    args = parser.parse_args()
    args.tokens = args.tokens or [500, 1000, 2000, 4000, 8000, *([16000] if args.long else [])]
    args.reader_tokens = args.reader_tokens or (2000 if args.long else 500)
    args.repeats = args.repeats or (9 if args.long else 2)
    return args


def _first_tokens(bench: Readers, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    points = [(tokens, 1) for tokens in args.tokens]
    readers = READERS if args.long else READERS[:-1]  # as text, 32 readers take long
    points += [(args.reader_tokens, n) for n in readers if (args.reader_tokens, n) not in points]
    rows = []
    for num_tokens, num_readers in points:

        def measure(side: str, point: tuple[int, int] = (num_tokens, num_readers)) -> Any:
            return bench.first_token(side, *point)

        for repeat, side, found in _results(FIRST_TOKEN_SIDES, number, args.repeats, measure):
            rows.append(
                {
                    "pass": number,
                    "repeat": repeat,
                    "side": side,
                    "tokens": num_tokens,
                    "readers": num_readers,
                    **found,
                }
            )
        print(
            f"pass {number}, {num_readers} readers of {num_tokens} tokens, to the first token: "
            f"{_in_words(rows, 'median_s')}",
            flush=True,
        )
    return rows


def _decodes(bench: Readers, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num_readers in READERS:

        def measure(side: str, num_readers: int = num_readers) -> Any:
            return bench.decode(side, num_readers)

        sides = (*DECODE_SIDES, "stock") if bench.stock else DECODE_SIDES
        repeats = max(1, args.repeats // 3)
        for repeat, side, steps in _results(sides, number, repeats, measure):
            rows += [
                {
                    "pass": number,
                    "repeat": repeat,
                    "side": side,
                    "readers": num_readers,
                    "step_s": round(seconds, 6),
                }
                for seconds in steps
            ]
        print(
            f"pass {number}, decode, {num_readers} readers: {_in_words(rows, 'step_s')}", flush=True
        )
    return rows


def _results(
    sides: Sequence[str], number: int, repeats: int, measure: Callable[[str], Any]
) -> list[tuple[int, str, Any]]:
    """(repeat, side, result) of the sides in turn; `text` runs but once."""
    return [
        (repeat, side, measure(side))
        for repeat in range(repeats)
        for side in in_turn(sides, number + repeat)
        if side != "text" or repeat == 0
    ]


def _in_words(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """The last value of each side."""
    last = {row["side"]: row[column] for row in rows}
    return ", ".join(f"{side} {1e3 * seconds:.0f} ms" for side, seconds in last.items())


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Chats that are cut inside: time to first token behind edits, and what cutting costs.

    python -m benchmarks.inside [--tokens 2000] [--turns 5] [--index-tokens 1000000]

One engine; text over prefix caching and mode "choreo" with cuts by content take turns. No side
forgets anything between its turns.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness.engine import forced, start_choreo_engine
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.texts import long_text
from benchmarks.inside.bars import cost_reaches_bar, edits_reach_bar
from benchmarks.inside.measure import (
    NUM_DOCUMENTS,
    head_line,
    measure_cost,
    measure_edits,
    measure_index,
    pasted,
)
from benchmarks.inside.tables import TABLES

PIECE_TOKENS = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt; 0: none")
    parser.add_argument("--turns", type=int, default=5, help="after the first one")
    parser.add_argument("--index-tokens", type=int, default=1_000_000, help="0: none")
    args = parser.parse_args()
    if args.index_tokens:
        write_csv("inside_index", [measure_index(args.index_tokens, PIECE_TOKENS)], **record())
    if args.tokens:
        llm = start_choreo_engine(4, max_model_len=8192, max_num_batched_tokens=2048)
        tokenizer, one_token = llm.get_tokenizer(), forced(llm, 1)
        prompt = long_text(tokenizer, args.tokens + 150, 1, "\n\n")  # up to a report shorter
        size = args.tokens // NUM_DOCUMENTS + 150
        documents = [long_text(tokenizer, size, 10 + seed, "\n\n") for seed in range(NUM_DOCUMENTS)]
        rows = measure_edits(llm, one_token, prompt, documents, args.turns)
        write_csv("inside_edits", rows, **record())
        chats = [head_line(prompt[: len(prompt) // 4], 1), head_line(prompt, 2)]
        costs = measure_cost(llm, one_token, [*chats, pasted(documents, 1)])
        write_csv("inside_cost", costs, **record())
    print(as_text([TABLES[name] for name in ("inside_edits", "inside_cost", "inside_index")]))
    is_fast = edits_reach_bar(read_csv("inside_edits"))
    return int(not (is_fast and cost_reaches_bar(read_csv("inside_cost"))))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Chats that name no messages: time to first token, and KV blocks.

    python -m benchmarks.on_ramps [--tokens 5000] [--history 2000] [--turns 5]

One engine; the sides take turns. No side forgets anything between its turns.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness.engine import empty_caches, forced, start_choreo_engine
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.texts import long_text
from benchmarks.on_ramps.bars import bars_reached
from benchmarks.on_ramps.chats import (
    NUM_AGENTS,
    NUM_DOCUMENTS,
    Bot,
    measure_agents,
    measure_retrieval,
    retrieval,
)
from benchmarks.on_ramps.tables import TABLES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5000, help="of all documents; 0: none")
    parser.add_argument("--history", type=int, default=2000, help="tokens that agents share; 0")
    parser.add_argument("--turns", type=int, default=5, help="of the bot, after the first one")
    args = parser.parse_args()
    from vllm import SamplingParams

    llm = start_choreo_engine(4, max_model_len=8192, max_num_batched_tokens=2048)
    tokenizer, one_token = llm.get_tokenizer(), forced(llm, 1)
    bot = Bot(llm, one_token)
    small = [long_text(tokenizer, 160, seed) for seed in range(100, 103)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    bot.check_outputs([retrieval(small, number) for number in range(100, 103)], greedy)
    if args.tokens:
        # Beside the documents: a system text, numbers, a question.
        size = args.tokens // NUM_DOCUMENTS + 40  # they are up to a report shorter
        documents = [long_text(tokenizer, size, seed) for seed in range(NUM_DOCUMENTS)]
        rows = measure_retrieval(bot, documents, args.turns)
        write_csv("on_ramps_retrieval", rows, **record())
    bot.close()
    empty_caches(llm)
    if args.history:
        size = args.history // NUM_AGENTS
        history = [long_text(tokenizer, size, 50 + seed) for seed in range(NUM_AGENTS)]
        agents = measure_agents(llm, lambda: Bot(llm, one_token), history)
        write_csv("on_ramps_agents", agents, **record())
    print(as_text(TABLES.values()))
    return int(not bars_reached(read_csv("on_ramps_retrieval"), read_csv("on_ramps_agents")))


if __name__ == "__main__":
    sys.exit(main())

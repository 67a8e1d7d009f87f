# SPDX-License-Identifier: Apache-2.0
"""Prompts from schemas: time to first token, and answers.

    python -m benchmarks.pml [--documents 5000 8000] [--in-flight 1 8 32] [--turns 3] [--limit 100]
    python -m benchmarks.pml --data FILE [--model MODEL]

With `--data` documents and questions are those of files of MuSiQue, HotpotQA, LongBench or
NaturalQuestions, one JSON object a line, and rows of other files stay; without, they are generated.
One engine; the sides take turns. Whoever runs as text empties the prefix cache before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import start_choreo_engine
from benchmarks.harness.record import read_csv, record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.pml import answers, first_token
from benchmarks.pml.bars import bar_reached
from benchmarks.pml.tables import ANSWERS, FILES, FIRST_TOKEN, TABLES
from vllm_choreo.lab.problems import load_jsonl

# Beside the document: an instruction, a question, a token, and padding to whole blocks.
ROOM_TOKENS = 192
MAX_MODEL_LEN = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="*", default=[5000, 8000], help="tokens")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3, help="with one prompt in flight")
    parser.add_argument("--limit", type=int, default=100, help="problems of each task; 0: none")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="JSON lines")
    parser.add_argument("--model", help="folder or name; default: the small test model")
    parser.add_argument("--answer-tokens", type=int, default=32, help="of an answer, with --data")
    args = parser.parse_args()
    if max(args.in_flight) > first_token.NUM_ROLES:
        parser.error(f"there are instructions for {first_token.NUM_ROLES} prompts")
    longest = max([2048, *(tokens + ROOM_TOKENS for tokens in args.documents)])
    if args.data:  # whose questions have documents of their own
        longest = MAX_MODEL_LEN
    settings = {"choreo": {"host_memory_gib": first_token.HOST_GIB}}
    llm = start_choreo_engine(
        4,
        max_model_len=min(longest, MAX_MODEL_LEN),
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        additional_config=settings,
        model=args.model,
    )
    problems = [problem for path in args.data for problem in load_jsonl(path)]
    ending = FILES if args.data else ""  # what files say stands beside what is generated
    names = [path.stem for path in args.data]
    about = {"data": ", ".join(names)} if names else {}
    rows = []
    for tokens in args.documents:
        texts = first_token.real_texts(llm.get_tokenizer(), problems, tokens) if problems else ()
        rows += first_token.measure(llm, tokens, args.in_flight, args.turns, texts)
    where = record()
    if rows:
        name = FIRST_TOKEN + ending
        others = rows_of_others(name, **about) if about else []
        write_csv(name, [*others, *({**about, **row, **where} for row in rows)])
    if args.limit:
        name = ANSWERS + ending
        others = [row for row in read_csv(name) if row["task"] not in names] if names else []
        write_csv(name, [*others, *({**row, **where} for row in _answers(llm, args))])
    print(as_text(TABLES.values()))
    return int(not args.data and not bar_reached(read_csv("pml_first_token")))


def _answers(llm: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.data:
        return answers.measure(llm, args.limit)
    lengths = (args.limit, args.answer_tokens)
    return [row for path in args.data for row in answers.measure_file(llm, path, *lengths)]


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Loading kept messages against encoding them.

python -m benchmarks.keep [--tokens 8000] [--message-tokens 1000] [--turns 5]
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness.engine import start_choreo_engine
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.keep.bars import bar_reached
from benchmarks.keep.measure import MESSAGE_TOKENS, measure
from benchmarks.keep.tables import TABLES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000], help="in all")
    parser.add_argument("--message-tokens", type=int, default=MESSAGE_TOKENS)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    longest = max(4096, 2 * args.message_tokens + 256)
    llm = start_choreo_engine(3, max_model_len=longest, max_num_batched_tokens=2048)
    rows = [row for n in args.tokens for row in measure(llm, n, args.message_tokens, args.turns)]
    write_csv("keep", rows, **record())
    print(as_text(TABLES.values()))
    return int(not bar_reached(read_csv("keep")))


if __name__ == "__main__":
    sys.exit(main())

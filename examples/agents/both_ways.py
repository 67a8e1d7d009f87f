# SPDX-License-Identifier: Apache-2.0
"""Runs agents twice on one server, as plain requests and choreographed, and compares the cost.

The examples beside this file differ in the framework alone; each is a function that takes a `Way`.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.lab.problems.long_documents import reports

WAYS = {"vLLM, prefix caching": "off", "choreographed": "choreo"}


@dataclass
class Way:
    """One of the two ways, and what it took.

    Attributes:
        base_url, api_key, model: of the server.
        conversations: of this way.
        tag: stands in front of all texts, so that nothing is in a cache from the last time.
        num_documents, document_reports: how much there is to read; a report has about 70 tokens.
        max_tokens: of an answer.
        first_tokens: from each request to the first token of its answer, in seconds.
        encoded_tokens: that the engine ran.
        said: the answers.
    """

    base_url: str
    api_key: str
    model: str
    conversations: Conversations
    num_documents: int
    document_reports: int
    max_tokens: int
    tag: str = field(default_factory=lambda: secrets.token_hex(3))
    first_tokens: list[float] = field(default_factory=list)
    encoded_tokens: int = 0
    said: list[str] = field(default_factory=list)

    def documents(self) -> list[str]:
        """Texts that nobody knows without reading them, and a line that asks for one."""
        num = self.document_reports
        return [
            f"[{self.tag}] Document {i}.\n"
            + "\n".join(report for p in reports(1, i, num) for report in p.documents)
            for i in range(self.num_documents)
        ]


def compare(run: Callable[[Way], None]) -> None:
    """Run an example both ways, as the command line says, and print what it took."""
    args = _parser(run.__doc__ or "").parse_args()
    ways = {}
    for name, mode in WAYS.items():
        way = Way(
            args.base_url, args.api_key, args.model, Conversations(mode),
            args.documents, args.reports, args.max_tokens,
        )  # fmt: skip
        run(way)
        way.encoded_tokens = way.conversations.encoded_tokens
        ways[name] = way
    print(f"{ways['choreographed'].said[-1]!r}\n")
    print(f"| | {' | '.join(ways)} | ratio |\n|---|---:|---:|---:|")
    rows: dict[str, list[float]] = {
        "tokens encoded": [way.encoded_tokens for way in ways.values()],
        "time to first token, median, ms": [
            1000 * statistics.median(way.first_tokens) for way in ways.values()
        ],
    }
    for title, (before, after) in rows.items():
        print(f"| {title} | {before:,.0f} | {after:,.0f} | {before / after:.1f}× |")


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="alpha")
    parser.add_argument("--model", default="smollm")
    parser.add_argument("--documents", type=int, default=4, help="how many are to be read")
    parser.add_argument("--reports", type=int, default=6, help="of 70 tokens in each document")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer")
    return parser

# SPDX-License-Identifier: Apache-2.0
"""Tokens that are left to be encoded in rivals' settings, by the plans of the chats: no engine.

    python -m benchmarks.rivals.plans [--data FILE ...] [--limit 12]

Of each counted request: all but the longest prefix that was sent before, in whole blocks, is what
vLLM's prefix cache leaves; all but what is found, what the contexts "seen" and "alone" leave.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.texts import long_text
from benchmarks.rivals import layouts
from benchmarks.rivals.questions import read_questions
from benchmarks.rivals.sides import Rows
from benchmarks.rivals.tables import TABLES
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.marks import marked
from vllm_choreo.chat.matching import AUTO_CONTEXTS, Matching, plan_chat
from vllm_choreo.chat.message_table import MessageTable

BLOCK_SIZE = 16
_UNLIMITED = 2**62
# In place of what the agents say.
_ANSWER = "I say that the number of the second report is the largest of these, and here is why."


class Follower:
    """A tenant of each context, and a prefix cache, which see the same chats.

    Args:
        tokenizer: tokenizer of transformers, with a chat template.
        ends: tokens that end what the model generates.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._cutter = Cutter(tokenizer, ends)
        self._texts: list[list[int]] = []
        self._tables = {way: MessageTable(_UNLIMITED, _UNLIMITED) for way in AUTO_CONTEXTS}
        self._count = 0

    def follow(self, chat: layouts.Chat) -> dict[str, int]:
        """Return the tokens of a chat, and those that are left to be encoded by each way."""
        marks, contents = marked(chat)
        text, marked_text = (
            self._tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
            for one in (chat, marks)
        )
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        found = {"prompt_tokens": len(tokens), "text": len(tokens) - self._cached(tokens)}
        for way, table in self._tables.items():
            split = self._cutter.split(
                tokens, text, marked_text, contents, cut="content", keeps_beginning=way == "alone"
            )
            how = Matching(context=way, reads_edits=True)
            plan = plan_chat(split, table, how, lambda _: True, self._new_id)
            for piece in plan.new:
                table.add(piece.entry)
            found[way] = plan.num_new_tokens + len(plan.header)
        return found

    def _cached(self, tokens: list[int]) -> int:
        """Tokens of the longest prefix that was sent before, in whole blocks."""
        longest = max((_num_common(tokens, one) for one in self._texts), default=0)
        self._texts.append(tokens)
        return longest // BLOCK_SIZE * BLOCK_SIZE

    def _new_id(self) -> str:
        self._count += 1
        return f"s/{self._count}"


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def plans_of(name: str, make: Callable[[], layouts.Layout], follower: Follower) -> Rows:
    """A row for each counted request of a layout."""
    layout, rows = make(), []
    try:
        asked = next(layout)
        while True:
            left = follower.follow(asked.chat)
            if asked.kind == "timed":
                rows.append({"layout": name, **left})
            asked = layout.send(_ANSWER)
    except StopIteration:
        return rows


def makers(
    text: layouts.Text, data: Sequence[Path], limit: int
) -> Mapping[str, Callable[[], layouts.Layout]]:
    """What begins each layout, by its name."""
    made: dict[str, Any] = {
        name: partial(getattr(layouts, name), text, **layouts.SIZES[name])
        for name in ("permuted", "multidoc", "agents")
    }
    for path in data:
        questions = read_questions(path, limit)
        made[f"ragqa {path.stem}"] = partial(layouts.ragqa, questions, **layouts.SIZES["ragqa"])
    return made


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files of questions")
    parser.add_argument("--limit", type=int, default=12, help="of questions of a file; 0: all")
    args = parser.parse_args(words)
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())

    @cache
    def text(num_tokens: int, seed: int) -> str:
        return long_text(tokenizer, num_tokens + 50, seed)

    ends = end_tokens(tokenizer, {})
    rows = [
        row
        for name, make in makers(text, args.data, args.limit).items()
        for row in plans_of(name, make, Follower(tokenizer, ends))
    ]
    write_csv("rivals_plans", rows, **record())
    print(as_text([TABLES["rivals_plans"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

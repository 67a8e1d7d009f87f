# SPDX-License-Identifier: Apache-2.0
"""Chats whose turns differ inside their messages; what cutting them takes, and what is kept."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.engine import empty_caches
from benchmarks.harness.turns import in_turn
from vllm_choreo.chat.content_cuts import content_cuts
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.edits import anchors
from vllm_choreo.chat.marks import marked
from vllm_choreo.chat.matching import Matching, plan_chat
from vllm_choreo.chat.message_table import Entry, MessageTable, digest

SIDES = ("text", "choreo")
NUM_DOCUMENTS = 5
CUT = Matching(reads_edits=True)
_MB = 1e6
_VOCABULARY = 50_000
_SHARE_OF_ENDS = 0.01  # of tokens that end a sentence
Chat = list[dict[str, str]]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def head_line(prompt: str, number: int) -> Chat:
    """A chat whose system prompt begins with a date and an id, which no other turn has."""
    line = f"It is day {number} of the year, {number * 7 % 24}:{number * 13 % 60:02}, run {number}."
    return [turn("system", f"{line}\n\n{prompt}"), turn("user", f"Question {number}: which one?")]


def pasted(documents: Sequence[str], number: int) -> Chat:
    """A chat with all documents in one turn, in an order of its own, and a question."""
    order = random.Random(number).sample(range(len(documents)), len(documents))
    texts = [documents[n] for n in order]
    return [turn("user", "\n\n".join([*texts, f"Question {number}: which number is largest?"]))]


def measure_edits(
    llm: Any, one_token: Any, prompt: str, documents: Sequence[str], num_turns: int
) -> list[dict[str, Any]]:
    """One row for each kind of chat, turn and side; in the first turn, 0, all is new."""
    chats = {
        "a date in the first line": lambda number: head_line(prompt, number),
        "documents pasted into one turn": lambda number: pasted(documents, number),
    }
    return [row for name, make in chats.items() for row in _one_kind(llm, one_token, name, make,
                                                                     num_turns)]  # fmt: skip


def _one_kind(
    llm: Any, one_token: Any, name: str, make: Any, num_turns: int
) -> list[dict[str, Any]]:
    from vllm_choreo import Choreography

    sides = {"text": Choreography(llm, mode="baseline"), "choreo": Choreography(llm)}
    rows = []
    for number in range(num_turns + 1):
        for side in in_turn(SIDES, number):
            began = time.perf_counter()
            auto = "choreo" if side == "choreo" else "off"
            message = sides[side].chat(
                make(number), auto=auto, cut="content", sampling_params=one_token
            )
            seconds, usage = time.perf_counter() - began, message.usage
            rows.append(
                {
                    "chat": name,
                    "turn": number,
                    "side": side,
                    "first_token_s": round(seconds, 5),
                    "prompt_tokens": usage.reused_tokens + usage.encoded_tokens - 1,
                    "reused_tokens": usage.reused_tokens,
                }
            )
            print(rows[-1], flush=True)
    # One line of a table: that of the first turn.
    for row in rows:
        row["prompt_tokens"] = rows[0]["prompt_tokens"]
    for c in sides.values():
        c.close()
    empty_caches(llm)
    return rows


# -- what it costs ---------------------------------------------------------------------------------


def measure_cost(llm: Any, one_token: Any, chats: Sequence[Chat]) -> list[dict[str, Any]]:
    """One row for each chat: seconds of cutting, and until its first token as text."""
    tokenizer = llm.get_tokenizer()
    generation = llm.model_config.try_get_generation_config()
    cutter = Cutter(tokenizer, end_tokens(tokenizer, generation))
    cutter.cut_content(_split(cutter, tokenizer, chats[0]))  # ranks the vocabulary, once
    rows = []
    for chat in chats:
        empty_caches(llm)
        began = time.perf_counter()
        llm.chat(chat, one_token, use_tqdm=False)
        first_token_s = time.perf_counter() - began
        split_s, split = _timed(lambda chat=chat: _split(cutter, tokenizer, chat))
        cut_s, cut = _timed(lambda split=split: cutter.cut_content(split))
        book = MessageTable(10**6, 10**9)
        plan_s, _ = _timed(
            lambda cut=cut, book=book: plan_chat(cut, book, CUT, lambda _: True, lambda: "s/0")
        )
        rows.append(
            {
                "prompt_tokens": len(split.token_ids),
                "first_token_s": round(first_token_s, 5),
                "split_s": round(split_s, 6),
                "cut_s": round(cut_s, 6),
                "plan_s": round(plan_s, 6),
                "share": round(cut_s / first_token_s, 6),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _timed(
    do: Any, clock: Callable[[], float] = time.perf_counter, repeats: int = 5
) -> tuple[float, Any]:
    """The least time of several, and what was made."""
    times: list[float] = []
    made: Any = None
    for _ in range(repeats):
        began = clock()
        made = do()
        times.append(clock() - began)
    return min(times), made


def _split(cutter: Cutter, tokenizer: Any, chat: Chat) -> Any:
    marks, contents = marked(chat)
    text, marked_text = (
        tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in (chat, marks)
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return cutter.split(token_ids, text, marked_text, contents)


def measure_index(num_tokens: int, piece_tokens: int) -> dict[str, Any]:
    """A row: the memory of a table of messages, as whole ones and as pieces, and how fast such a
    text is cut.

    Args:
        num_tokens: tokens of all messages.
        piece_tokens: tokens of each.
    """
    row: dict[str, Any] = {"tokens": num_tokens, "piece_tokens": piece_tokens}
    for column, in_parts in (("messages_mb", False), ("pieces_mb", True)):
        gc.collect()
        tracemalloc.start()
        book = _filled(num_tokens, piece_tokens, in_parts)
        gc.collect()
        row[column] = round(tracemalloc.get_traced_memory()[0] / _MB, 2)
        tracemalloc.stop()
        del book
    rng = np.random.default_rng(1)
    text = rng.integers(_VOCABULARY, size=num_tokens).tolist()
    ranks = (rng.random(_VOCABULARY) < _SHARE_OF_ENDS).astype(np.uint8)
    # In time of the core, for it is one, and others may be on it.
    cut_s, cuts = _timed(lambda: content_cuts(text, ranks, piece_tokens), time.process_time)
    row["cuts"], row["cut_tokens_per_s"] = len(cuts), round(num_tokens / cut_s)
    print(row, flush=True)
    return row


def _filled(num_tokens: int, piece_tokens: int, in_parts: bool) -> MessageTable:
    book, rng = MessageTable(2**62, 2**62), random.Random(1)
    for number in range(num_tokens // piece_tokens):
        tokens = array("i", (rng.randrange(_VOCABULARY) for _ in range(piece_tokens)))
        entry = Entry(digest(tokens), digest([number]), f"session/auto.{number}", len(tokens))
        if in_parts:
            entry.anchors, entry.token_ids = anchors(tokens, ""), tokens
        book.add(entry)
    return book

# SPDX-License-Identifier: Apache-2.0
"""A retrieval bot whose documents come in changing order, and agents with roles of their own over
one history: as chats that name no messages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.engine import empty_caches, scheduler_of
from benchmarks.harness.turns import in_turn

SIDES = ("text", "choreo")
NUM_DOCUMENTS = 10
NUM_AGENTS = 8
SYSTEMS = [f"You are agent {n} of 8; say what only you would say." for n in range(NUM_AGENTS)]
Chat = list[dict[str, str]]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def retrieval(documents: list[str], number: int) -> Chat:
    """The bot's chat of a turn: all documents in an order of its own, and a question."""
    order = random.Random(number).sample(range(len(documents)), len(documents))
    found = [turn("user", f"Document {n}: {documents[n]}") for n in order]
    system = turn("system", "Answer from the documents that were found, and name their numbers.")
    return [system, *found, turn("user", f"Question {number}: which of the numbers is largest?")]


def agents(history: list[str], systems: Sequence[str] = SYSTEMS) -> list[Chat]:
    """One chat for each agent: its system text, and the history that all of them have."""
    roles = ("user", "assistant")
    common = [turn(roles[n % 2], text) for n, text in enumerate(history)]
    return [
        [
            turn("system", system),
            *common,
            turn("user", "What is your opinion, after all that was said?"),
        ]
        for system in systems
    ]


class Bot:
    """Both ways on one engine: `Choreography.chat`, and the same chats over prefix caching."""

    def __init__(self, llm: Any, one_token: Any) -> None:
        from vllm_choreo import Choreography

        self.llm, self.one_token = llm, one_token
        self.sides = {"text": Choreography(llm, mode="baseline"), "choreo": Choreography(llm)}

    def close(self) -> None:
        for side in self.sides.values():
            side.close()

    def check_outputs(self, chats: list[Chat], greedy: Any) -> None:
        """Raises SystemExit: "exact" has other tokens than the text, or a chat is not cut."""
        with_text = self.sides["text"]
        for chat in chats:
            ours = self.sides["choreo"].chat(chat, auto="exact", sampling_params=greedy)
            theirs = with_text.chat(chat, sampling_params=greedy)
            if ours.generated_token_ids != theirs.generated_token_ids or not ours.parents:
                raise SystemExit("exact and text differ, or nothing was cut: nothing measured")
        print(f"exact = text: same greedy tokens in {len(chats)} chats", flush=True)

    def answer(self, side: str, chat: Chat) -> tuple[float, Any]:
        """Seconds until its first token, rendering included, and the message."""
        began = time.perf_counter()
        auto = "choreo" if side == "choreo" else "off"
        message = self.sides[side].chat(chat, auto=auto, sampling_params=self.one_token)
        return time.perf_counter() - began, message


def measure_retrieval(bot: Bot, documents: list[str], num_turns: int) -> list[dict[str, Any]]:
    """One row for each turn and side; the first turn, in which all is new, is turn 0."""
    rows = []
    for number in range(num_turns + 1):
        for side in in_turn(SIDES, number):
            seconds, message = bot.answer(side, retrieval(documents, number))
            usage = message.usage
            rows.append(
                {
                    "turn": number,
                    "side": side,
                    "first_token_s": round(seconds, 5),
                    "prompt_tokens": usage.reused_tokens + usage.encoded_tokens - 1,
                    "reused_tokens": usage.reused_tokens,
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_agents(
    llm: Any, make: Callable[[], Bot], history: list[str], systems: Sequence[str] = SYSTEMS
) -> list[dict[str, Any]]:
    """One row for each side: the blocks that hold what its agents have read and written."""
    rows = []
    for side in SIDES:
        bot = make()
        empty_caches(llm)
        answers = [bot.answer(side, chat) for chat in agents(history, systems)]
        rows.append(
            {
                "side": side,
                "agents": len(systems),
                "history_tokens": sum(len(llm.get_tokenizer().encode(text)) for text in history),
                "kv_blocks": bot.sides["choreo"].stats()["num_blocks"]
                if side == "choreo"
                else _prefix_cache_blocks(llm),
                "seconds": round(sum(seconds for seconds, _ in answers), 3),
            }
        )
        print(rows[-1], flush=True)
        bot.close()
    return rows


def _prefix_cache_blocks(llm: Any) -> int:
    """Blocks that vLLM would find again: whole ones, hence a few less than were written."""
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    return sum(block.block_hash is not None for block in pool.blocks)

# SPDX-License-Identifier: Apache-2.0
"""Chats as others send them, one after the other; what is answered may go into the next.

permuted   a system prompt and documents, all in one turn, in several orders   (LMCache's
           long-doc-permutator)
multidoc   some of many documents in each turn                                 (multi_doc_qa)
ragqa      each document of a question alone behind the system prompt, then all of them with the
           question, in one turn                                               (rag-qa-quality)
agents     agents with a prefix of their own over one task, each reads what all before it said
           (KVCOMM)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.rivals.questions import Question

# Of each layout: its options, with their defaults.
SIZES: dict[str, dict[str, int]] = {
    "permuted": {
        "system_tokens": 1000, "documents": 5, "document_tokens": 500, "orders": 10,
        "max_tokens": 128,
    },
    "multidoc": {
        "system_tokens": 200, "documents": 20, "document_tokens": 500, "per_request": 5,
        "requests": 20, "max_tokens": 32,
    },
    "ragqa": {"passages": 0, "max_tokens": 32},
    "agents": {
        "agents": 5, "rounds": 2, "input_tokens": 1000, "prefix_tokens": 512, "max_tokens": 128,
    },
}  # fmt: skip

Chat = list[dict[str, str]]
# One paragraph that is long enough for a piece of its own, as others pad theirs to a whole chunk.
QA_SYSTEM = (
    "You will be asked a question after several passages, each under its title. Answer it from "
    "these passages alone, and do not go by what you know besides. Some of the passages have "
    "nothing to do with the question; often two or more of them have to be put together. The "
    "answer is a name, a date, a number, yes or no, or a few words of the passages: give it alone, "
    "in at most five words, without a sentence around it.\n\n"
)


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        chat: its messages.
        max_tokens: of its answer.
        kind: "timed"; "warm": it leaves something behind, and is not counted.
        gold: right answers; none: any is.
    """

    chat: Chat
    max_tokens: int
    kind: str = "timed"
    gold: tuple[str, ...] = ()


# Yields requests, and is sent the text of each answer.
Layout: TypeAlias = Generator[Ask, str, None]
Text = Callable[[int, int], str]  # of so many tokens, by its seed


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def permuted(
    text: Text,
    *,
    system_tokens: int,
    documents: int,
    document_tokens: int,
    orders: int,
    max_tokens: int,
) -> Layout:
    """Documents behind a system prompt, all of them in each turn; the first turn is not counted."""
    system = turn("system", text(system_tokens, 0))
    texts = [text(document_tokens, 1 + number) for number in range(documents)]
    for number in range(orders + 1):
        rng = random.Random(number)
        order = rng.sample(range(documents), documents) if number else range(documents)
        content = "\n\n".join(texts[n] for n in order)
        yield Ask([system, turn("user", content)], max_tokens, "timed" if number else "warm")


def multidoc(
    text: Text,
    *,
    system_tokens: int,
    documents: int,
    document_tokens: int,
    per_request: int,
    requests: int,
    max_tokens: int,
) -> Layout:
    """Some of many documents, drawn for each request, behind a system prompt."""
    system = turn("system", text(system_tokens, 0))
    texts = [text(document_tokens, 1 + number) for number in range(documents)]
    for number in range(requests):
        drawn = random.Random(number).sample(texts, per_request)
        content = "\n\n".join([*drawn, f"Question {number}: which of the numbers is largest?"])
        yield Ask([system, turn("user", content)], max_tokens)


def ragqa(questions: Sequence[Question], *, passages: int, max_tokens: int) -> Layout:
    """Questions, one after the other: passages that were not sent yet, each alone behind the system
    prompt, then all passages and the question in one turn.

    Args:
        passages: of each question, see `Question.with_fewer`.
    """
    sent: set[str] = set()
    for question in (one.with_fewer(passages) for one in questions):
        for passage in question.passages:
            if passage not in sent:
                yield Ask([turn("user", f"{QA_SYSTEM}{passage}\n\n")], 1, "warm")
        sent.update(question.passages)
        text = "".join(f"{passage}\n\n" for passage in question.passages)
        content = f"{QA_SYSTEM}{text}Question: {question.text}\nAnswer in a few words."
        yield Ask([turn("user", content)], max_tokens, gold=question.answers)


def agents(
    text: Text, *, agents: int, rounds: int, input_tokens: int, prefix_tokens: int, max_tokens: int
) -> Layout:
    """Each agent reads the task, and what every other one said last."""
    prefixes = [f"You are agent {n}. {text(prefix_tokens, 100 + n)}" for n in range(agents)]
    said: list[str] = [""] * agents
    for number in range(rounds):
        task = turn("user", text(input_tokens, number))
        for agent, prefix in enumerate(prefixes):
            others = [
                turn("user", f"Agent {n} said: {said[n]}")
                for n in range(agents)
                if n != agent and said[n]
            ]
            chat = [turn("system", prefix), task, *others, turn("user", "What do you say?")]
            said[agent] = yield Ask(chat, max_tokens)

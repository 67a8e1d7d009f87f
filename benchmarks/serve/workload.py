# SPDX-License-Identifier: Apache-2.0
"""A mix of sessions: debates, retrieval over 200 documents, long chats. Token ids are drawn.

A session is a list of turns, one after the other; each reads messages in an order and generates.
All policies are given the same ones: what is generated has the same length whoever generates it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

NUM_DOCUMENTS = 200
DOCUMENT_TOKENS = 96
_VOCABULARY = (20, 400)
_AGENTS, _ROUNDS = 3, 3
_CHAT_TURNS = 6
_DOCUMENTS_READ = 4


@dataclass(frozen=True)
class Turn:
    """One call of a session.

    Attributes:
        name: name of the message that it makes.
        given: messages that are given now, by name: their token ids.
        reads: names of the messages that it reads, in their order.
        header: token ids of its header.
        num_tokens: tokens to generate.
    """

    name: str
    given: dict[str, tuple[int, ...]]
    reads: tuple[str, ...]
    header: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns, one after the other."""

    kind: str
    turns: tuple[Turn, ...]


class Transcript:
    """Messages of a session as text, for those to whom a prompt is all that is read."""

    def __init__(self) -> None:
        self._messages: dict[str, tuple[int, ...]] = {}

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Token ids of all that a turn reads, and of its header."""
        self._messages.update(turn.given)
        return (*(t for name in turn.reads for t in self._messages[name]), *turn.header)

    def answer(self, turn: Turn, generated: Sequence[int]) -> None:
        """Take in what a turn has generated."""
        self._messages[turn.name] = (*turn.header, *generated)


def sessions(count: int, seed: int = 0) -> list[Session]:
    """Draw sessions, of the kinds by turns."""
    draw = random.Random(seed)
    documents = {f"document{i}": _tokens(draw, DOCUMENT_TOKENS) for i in range(NUM_DOCUMENTS)}
    makers = cycle((_debate, lambda rng: _retrieval(rng, documents), _chat))
    return [next(makers)(draw) for _ in range(count)]


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(*_VOCABULARY) for _ in range(count))


def _debate(draw: random.Random) -> Session:
    """Agents with roles of their own, each of which reads what the others said last."""
    roles = {f"role{a}": _tokens(draw, 32) for a in range(_AGENTS)}
    given = {**roles, "question": _tokens(draw, 64)}
    turns = []
    for number in range(_ROUNDS):
        for agent in range(_AGENTS):
            others = [f"{number - 1}.{a}" for a in range(_AGENTS) if number and a != agent]
            reads = (f"role{agent}", "question", *others)
            turns.append(Turn(f"{number}.{agent}", given, reads, _tokens(draw, 4), 32))
            given = {}
    return Session("debate", tuple(turns))


def _retrieval(draw: random.Random, documents: dict[str, tuple[int, ...]]) -> Session:
    """A question about some documents, of which few are asked for often."""
    names = list(documents)
    weights = [1 / (1 + rank) for rank in range(len(names))]
    read: dict[str, None] = {}
    while len(read) < _DOCUMENTS_READ:
        read[draw.choices(names, weights)[0]] = None
    given = {"role": _tokens(draw, 32), **{name: documents[name] for name in read}}
    turn = Turn("answer", given, ("role", *read), _tokens(draw, 24), 16)
    return Session("retrieval", (turn,))


def _chat(draw: random.Random) -> Session:
    """A chat that reads all that was said."""
    given, said, turns = {"system": _tokens(draw, 64)}, ["system"], []
    for number in range(_CHAT_TURNS):
        turns.append(Turn(f"turn{number}", given, tuple(said), _tokens(draw, 48), 24))
        said.append(f"turn{number}")
        given = {}
    return Session("chat", tuple(turns))

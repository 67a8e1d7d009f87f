# SPDX-License-Identifier: Apache-2.0
"""Sessions of a mix: debates, retrieval over shared documents, long chats.

Lengths are drawn around those of the tables of this project; documents and roles are shared by all
sessions, and asked for by a law of Zipf.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_NUM_ROLES = 40
_ROLE_TOKENS = 300
_DOCUMENT_TOKENS = 1000
_MAX_MESSAGES = 16  # of a session


class Part(NamedTuple):
    """A message that a call reads: a number, and its tokens."""

    key: int
    num_tokens: int


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        reads: messages that it reads, in the order of the text.
        new: tokens of its header.
        out: tokens that it generates.
        makes: message that header and answer become.
        think: seconds between the answer before it and this call.
        own: messages of its session, with this call's; set for the last call of a session, which
            is then closed.
    """

    reads: Sequence[Part]
    new: int
    out: int
    makes: Part
    think: float
    own: Sequence[int] = ()

    @property
    def num_prompt(self) -> int:
        return sum(part.num_tokens for part in self.reads) + self.new


class _Session:
    """A session that is being drawn."""

    def __init__(self, seed: int, number: int) -> None:
        self.draw = random.Random(seed << 40 | number)
        self._first = number * _MAX_MESSAGES + 1
        self.keys: list[int] = []

    def around(self, mean: int) -> int:
        return max(8, int(self.draw.gauss(mean, mean / 4)))

    def made(self, num_tokens: int) -> Part:
        self.keys.append(self._first + len(self.keys))
        return Part(self.keys[-1], num_tokens)

    def call(self, reads: Sequence[Part], new: int, out: int, think: float) -> Call:
        return Call(tuple(reads), new, out, self.made(new + out), think)


class Workload:
    """Sessions by their numbers: the same ones, in whatever order their calls come.

    Args:
        num_documents: documents that retrieval chooses from.
    """

    def __init__(self, seed: int, num_documents: int) -> None:
        self._seed = seed
        self._documents = [Part(-number - 1, _DOCUMENT_TOKENS) for number in range(num_documents)]
        weights = (1 / (rank + 10) for rank in range(num_documents))
        self._weights = list(itertools.accumulate(weights))
        first = -num_documents - 1
        self._roles = [Part(first - number, _ROLE_TOKENS) for number in range(_NUM_ROLES)]

    def session(self, number: int) -> Iterator[Call]:
        """Draw a session, each kind as likely as the others."""
        session = _Session(self._seed, number)
        kinds = (self._debate, self._retrieval, self._chat)
        calls = session.draw.choice(kinds)(session)
        call = next(calls)
        for following in calls:
            yield call
            call = following
        yield replace(call, own=session.keys)

    def _debate(self, session: _Session) -> Iterator[Call]:
        """Three agents, two rounds: each reads its role, the task, and the last answers of all."""
        roles, task = session.draw.sample(self._roles, 3), session.made(session.around(200))
        last: list[Part] = []
        for _ in range(2):
            answers = []
            for number, role in enumerate(roles):
                others = last[number:] + last[:number]  # its own first
                call = session.call([role, task, *others], 30, session.around(400), 0.1)
                answers.append(call.makes)
                yield call
            last = answers

    def _retrieval(self, session: _Session) -> Iterator[Call]:
        """Two questions, each over five documents in the order of their rank, behind one role."""
        for _ in range(2):
            found = dict.fromkeys(self._document(session.draw) for _ in range(5))
            reads = [self._roles[0], *found]
            yield session.call(reads, session.around(40), session.around(150), 20.0)

    def _document(self, draw: random.Random) -> Part:
        at = draw.random() * self._weights[-1]
        return self._documents[bisect.bisect(self._weights, at)]

    def _chat(self, session: _Session) -> Iterator[Call]:
        """Six turns on what stands before."""
        history = [session.draw.choice(self._roles)]
        for _ in range(6):
            call = session.call(history, session.around(150), session.around(300), 30.0)
            history.append(call.makes)
            yield call

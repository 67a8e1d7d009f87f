# SPDX-License-Identifier: Apache-2.0
"""The clients of the soak: each does one thing after another to a server, and notes what it got.

Nothing is judged while the load runs; `judge` looks at all notes afterwards.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.harness.completions import greedy, stream_completion
from vllm_choreo import AsyncChoreoClient
from vllm_choreo.errors import ChoreoError, UnknownMessageError
from vllm_choreo.semantics.message import Message

VOCAB = (3, 512)  # of the tiny model, special tokens left out
DOC_TOKENS = (40, 96)
HEADER_TOKENS = (2, 6)
ANSWER_TOKENS = (2, 8)
DOCS = 8  # that a client keeps
FAR = 400  # the new offset of calls on shuffled messages, beyond all their parents


@dataclass(frozen=True)
class Seen:
    """A generated message, and where its parents were seen.

    Attributes:
        parents: `(message, start, stop, offset)` each.
        is_text: the call was in exact mode: the parents are text.
    """

    message: Message
    parents: tuple[tuple[Message, int, int, int], ...]
    new_offset: int
    is_text: bool = False


@dataclass
class Notes:
    """What a client did and got."""

    seen: list[Seen] = field(default_factory=list)
    texts: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, generated
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def draw_tokens(rng: random.Random, sizes: tuple[int, int]) -> list[int]:
    return [rng.randrange(*VOCAB) for _ in range(rng.randint(*sizes))]


class ChoreoUser:
    """A client with a session and some documents.

    Args:
        others: ids of messages of all users, to try whether they can be read.
    """

    def __init__(self, base_url: str, key: str, seed: int, others: list[str]) -> None:
        self.url, self.key = base_url, key
        self.rng = random.Random(seed)
        self.others = others
        self.notes = Notes()
        self.docs: list[Message] = []

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                async with AsyncChoreoClient(self.url, api_key=self.key) as c:
                    self.docs = []
                    for _ in range(self.rng.randint(15, 40)):
                        if time.monotonic() > until:
                            break
                        await self._act(c)
            except Exception as error:
                self.notes.failures.append(repr(error))

    async def _act(self, c: AsyncChoreoClient) -> None:
        if len(self.docs) < 3:
            await self._prefill(c)
            return
        actions = {
            self._prefill: 3,
            self._decode: 8,
            self._leave: 2,
            self._workflow: 2,
            self._exact: 1,
            self._mistake: 2,
            self._free: 1 if len(self.docs) > 4 else 0,
        }
        (action,) = self.rng.choices(list(actions), list(actions.values()))
        await action(c)
        self.notes.counts[action.__name__[1:]] += 1

    async def _prefill(self, c: AsyncChoreoClient) -> None:
        doc = await c.prefill(draw_tokens(self.rng, DOC_TOKENS))
        self.docs = [*self.docs[-DOCS + 1 :], doc]
        self.others.append(doc.id)

    def _arguments(self) -> dict[str, Any]:
        """Parents of a call, shuffled, some of them cut, at any positions."""
        chosen = self.rng.sample(self.docs, self.rng.randint(1, 3))
        spans = [(doc, self.rng.choice([0, 0, 7]), doc.num_tokens) for doc in chosen]
        offsets = [self.rng.randrange(FAR - DOC_TOKENS[1]) for _ in chosen]
        return {"parents": spans, "offsets": offsets, "new_offset": FAR}

    async def _decode(self, c: AsyncChoreoClient) -> None:
        arguments = self._arguments()
        sampling = greedy(self.rng.randint(*ANSWER_TOKENS))
        header = draw_tokens(self.rng, HEADER_TOKENS)
        self._note(await c.decode(header, sampling_params=sampling, **arguments), arguments)

    def _note(self, message: Message, arguments: dict[str, Any]) -> None:
        placed = zip(arguments["parents"], arguments["offsets"], strict=True)
        parents = tuple((*span, offset) for span, offset in placed)
        self.notes.seen.append(Seen(message, parents, arguments["new_offset"]))

    async def _leave(self, c: AsyncChoreoClient) -> None:
        """Go away in the middle of a stream; the name is free afterwards."""
        name = f"left{len(self.notes.seen)}-{self.rng.random():.9f}"
        header = draw_tokens(self.rng, HEADER_TOKENS)
        arguments = self._arguments()
        pieces = c.stream_decode(header, sampling_params=greedy(200), save_as=name, **arguments)
        async for _ in pieces:
            break
        await pieces.aclose()

    async def _workflow(self, c: AsyncChoreoClient) -> None:
        """A child that is sent before its parent is complete."""
        arguments = self._arguments()
        sampling = greedy(self.rng.randint(*ANSWER_TOKENS))
        header = draw_tokens(self.rng, HEADER_TOKENS)
        first = await c.submit(header=header, sampling_params=sampling, **arguments)
        second = await c.submit(
            header=header, parents=[first], offsets=[11], new_offset=90, sampling_params=sampling
        )
        parent, child = await first, await second
        self._note(parent, arguments)
        seen = Seen(child, ((parent, 0, parent.num_tokens, 11),), 90)
        self.notes.seen.append(seen)

    async def _exact(self, c: AsyncChoreoClient) -> None:
        chosen = self.rng.sample(self.docs, 2)
        message = await c.decode(
            draw_tokens(self.rng, HEADER_TOKENS),
            parents=chosen,
            mode="exact",
            sampling_params=greedy(self.rng.randint(*ANSWER_TOKENS)),
        )
        parents = tuple((doc, 0, doc.num_tokens, 0) for doc in chosen)
        self.notes.seen.append(Seen(message, parents, 0, is_text=True))

    async def _mistake(self, c: AsyncChoreoClient) -> None:
        """Something that must be refused, and disturb nobody."""
        foreign = self.rng.choice(self.others)
        if foreign.partition("/")[0] == c.session:
            foreign = f"{'0' * 32}/0"
        wrong: dict[str, Any] = self.rng.choice(
            [
                {"parents": [foreign]},
                {"parents": ["nobody"]},
                {"parents": [self.docs[0]], "offsets": [-1]},
                {"parents": [(self.docs[0], 5, 5)]},
                {"new_offset": 10**9},
                {"parents": self.docs * 40},
            ]
        )
        try:
            await c.decode([5], sampling_params=greedy(1), **wrong)
        except UnknownMessageError:
            self.notes.counts["unknown"] += 1
        except ChoreoError:
            self.notes.counts["refused"] += 1
        else:
            self.notes.failures.append(f"accepted: {str(wrong)[:100]}")

    async def _free(self, c: AsyncChoreoClient) -> None:
        await c.free(self.docs.pop(self.rng.randrange(len(self.docs))))


class OrdinaryUser:
    """A client of /v1/completions that knows nothing of choreography."""

    def __init__(self, http: httpx.AsyncClient, model: str, seed: int) -> None:
        self.http, self.model = http, model
        self.rng = random.Random(seed)
        self.notes = Notes()

    async def run(self, until: float) -> None:
        shared = draw_tokens(self.rng, (64, 64))
        while time.monotonic() < until:
            prompt = shared * self.rng.randint(0, 1) + draw_tokens(self.rng, DOC_TOKENS)
            num_tokens = self.rng.randint(*ANSWER_TOKENS)
            try:
                generated = [
                    token
                    async for chunk in stream_completion(self.http, self.model, prompt, num_tokens)
                    for token in chunk
                ]
            except Exception as error:
                self.notes.failures.append(repr(error))
                continue
            self.notes.texts.append((prompt, generated))
            self.notes.counts["ordinary"] += 1


async def run_all(users: list[Any], seconds: float) -> None:
    """Let all users act at once, for as long."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(user.run(until) for user in users))

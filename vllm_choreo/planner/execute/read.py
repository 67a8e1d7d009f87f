# SPDX-License-Identifier: Apache-2.0
r"""Division of a prompt for one call: parents that are read as messages, and a header.

    symbols   [system turn] [question] <answer 1> "and" <answer 2> [instruction, opening]
    exact     \___ shared prefixes: a chain of messages _____/      header
    choreo    \___ chain ___________/ message    alone  message     header

    symbols   [all that an earlier call has read] <its answer> [next turn, opening]
    exact     \___ its parents, its message _______________/  header

A chain is exact: each link is encoded with all before it, and ends where the text as a whole has a
token's end. Text beside messages is encoded alone if
other calls have the same, else with all that stands before it. Text that is to be read as a message
(an input, an answer from a cache or of another worker) is encoded alone, too, once for all calls
that read it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.planner.workers.worker import Answer, HeldMessage, ReadMessage, Uri, Worker

_LOGGER = logging.getLogger(__name__)
Key = tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """Text to be read as a message: an input, or an answer whose message lies elsewhere."""

    text: str


Part = str | Answer | Told


@dataclass(frozen=True)
class Reading:
    """A prompt, as one call reads it.

    Attributes:
        before: the answer of an earlier call, with whose prompt and answer this prompt begins.
        chain: texts of the shared prefix, each encoded with those before.
        parts: texts behind the chain, answers and `Told`, which are read as messages.
        header: text at the end, never empty.
    """

    chain: Key
    parts: tuple[Part, ...]
    header: str
    before: Answer | None = None

    @property
    def exact(self) -> bool:
        """True if the call reads nothing that was encoded apart."""
        return not self.parts

    def text(self) -> str:
        """Return the prompt as text, without that of `before`."""
        parts = (part if isinstance(part, str) else part.text for part in self.parts)
        return "".join((*self.chain, *parts, self.header))


def reading(pieces: Sequence[Part], cuts: Sequence[int], before: Answer | None = None) -> Reading:
    """Divide a prompt.

    Args:
        pieces: texts of the prompt, and answers and `Told` to be read as messages; the last one is
            text.
        cuts: numbers of the pieces at which shared prefixes end.
        before: answer of an earlier call, which `pieces` follow; see `Reading`.
    """
    first = next((i for i, p in enumerate(pieces) if not isinstance(p, str)), len(pieces))
    # A prompt may end with an empty answer: its header is the text before that.
    pieces = _up_to_text(pieces)
    chain: list[str] = []
    start = 0
    for cut in cuts:
        if cut < first and cut < len(pieces) - 1:
            link = "".join(str(piece) for piece in pieces[start : cut + 1])
            if link:
                chain.append(link)
            start = cut + 1
    rest: list[Part] = []
    for piece in pieces[start:]:
        if isinstance(piece, str) and rest and isinstance(rest[-1], str):
            rest[-1] += piece
        elif piece not in ("", Told("")):
            rest.append(piece)
    header = rest.pop() if rest else ""
    assert isinstance(header, str), "a prompt ends with text"
    return Reading(tuple(chain), tuple(rest), header, before)


def _up_to_text(pieces: Sequence[Part]) -> list[Part]:
    """Pieces up to the last one with text, which is text of the prompt itself."""
    kept = list(pieces)
    while len(kept) > 1 and kept[-1] == "":
        kept.pop()
        last = kept[-1]
        kept[-1] = last if isinstance(last, str) else last.text
    return kept


async def is_retold(worker: Worker, opening: str, answer: Answer, rest: str) -> bool:
    """Return whether the text of a prompt has, between `opening` and `rest`, an answer's tokens.

    `opening` is that of the answer's turn: before it, texts are tokenised apart as together. If the
    tokens differ, or are not known, a call may not read the message in place of the text.
    """
    texts = (opening, rest, opening + answer.text + rest)
    before, after, whole = await asyncio.gather(*map(worker.tokenize, texts))
    if before is None or after is None:
        return False
    return (*before, *answer.token_ids, *after) == whole


def repeated(prompts: Iterable[Sequence[str | None]]) -> frozenset[str]:
    """Texts that stand before messages in more than one prompt.

    Args:
        prompts: symbols of each behind its chain; None: a value that is read as a message.
    """
    counts: Counter[str] = Counter()
    for symbols in prompts:
        texts, between = [], ""
        for symbol in symbols:
            if symbol is None:
                texts.append(between)
            between = "" if symbol is None else between + symbol
        counts.update(set(texts) - {""})
    return frozenset(text for text, count in counts.items() if count > 1)


class SharedMessages:
    """Messages of one worker that the calls of a run share.

    Args:
        worker: the worker that encodes them.

    Attributes:
        alone: texts before messages that several calls have, which are encoded alone.
        num_shared, num_tokens: messages that were encoded for several calls, and the tokens of
            these and of the messages that were encoded beside a call.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.alone: frozenset[str] = frozenset()
        self.num_shared = self.num_tokens = 0
        self._links: dict[Hashable, asyncio.Future[HeldMessage]] = {}
        self._pinned: set[str] = set()
        self._saved: frozenset[str] = frozenset()
        self._is_loaded = False

    async def warm(self, chains: Sequence[Key]) -> int:
        """Encode chains and pin them; return how many.

        A worker that reads text alone needs no warming: its engine warms its prefix cache itself.
        """
        if not self.worker.reads_messages:
            return 0
        found = await asyncio.gather(*map(self._chain, chains))
        await self._pin([message for chain in found for message in chain])
        return len(chains)

    async def load(self, uri: Uri) -> None:
        """Load chains that were saved, once, and pin them.

        Raises:
            KeptError, GraphError: the saved messages do not fit here, or are no chains.
        """
        if self._is_loaded or not self.worker.reads_messages:
            return
        found = await self.worker.load(uri)
        for chain, message in found:
            link = self._links["chain", None, chain] = asyncio.get_running_loop().create_future()
            link.set_result(message)
        await self._pin([message for _, message in found])
        self._is_loaded, self._saved = True, frozenset(self._pinned)

    async def save(self, uri: Uri) -> None:
        """Save the pinned messages, unless all were saved or loaded already.

        A failure of the storage is only logged: the run's results must not be lost by it.
        """
        if self._pinned == self._saved:
            return
        made = [link.result() for link in self._links.values() if _is_made(link)]
        try:
            await self.worker.save([m for m in made if m.id in self._pinned], uri)
        except ChoreoError as error:
            _LOGGER.warning("Static beginnings could not be kept: %s", error)
        else:
            self._saved = frozenset(self._pinned)

    async def _pin(self, messages: Sequence[HeldMessage]) -> None:
        await self.worker.pin(messages)
        self._pinned.update(message.id for message in messages)

    async def answer(self, read: Reading, sampling: Mapping[str, Any]) -> Answer:
        """Run a call. Raises ChoreoError: it, or a message that it shares, is refused."""
        worker = self.worker
        if not worker.reads_messages:
            return await worker.decode(read.text(), (), True, sampling)
        beside: list[HeldMessage] = []
        try:
            parents = await self._parents(read, beside)
            answer = await worker.decode(read.header, parents, read.exact, sampling)
        except BaseException:
            await worker.free(beside)
            raise
        return replace(answer, parents=tuple(parents), beside=tuple(beside))

    async def drop_inexact_links(self, read: Reading, ends_turn: Callable[[str], bool]) -> Reading:
        """Leave out the links of a chain that end where the text, as a whole, has no token's end.

        Args:
            read: a call's prompt.
            ends_turn: whether a text ends a turn, where texts are tokenised apart as together.
        """
        if not read.chain or not self.worker.reads_messages:
            return read
        behind = (*read.parts, read.header)
        texts: list[str] = []
        start = 0  # of the turn, among texts
        for link in (*read.chain, behind[0]):
            if not isinstance(link, str):  # a message, whose tokens are those that it has
                return replace(read, chain=tuple(texts))
            if texts and ends_turn(texts[-1]):
                start = len(texts)
            text = link
            while len(texts) > start and not await self._ends_tokens([*texts[start:], text]):
                text = texts.pop() + text
            texts.append(text)
        *parts, header = (texts.pop(), *behind[1:])
        assert isinstance(header, str), "a prompt ends with text"
        return replace(read, chain=tuple(texts), parts=tuple(parts), header=header)

    async def _ends_tokens(self, texts: Sequence[str]) -> bool:
        """Return whether texts, as one, have the tokens that they have one by one."""
        found = await asyncio.gather(*map(self.worker.tokenize, ("".join(texts), *texts)))
        whole, *apart = [tokens or () for tokens in found]
        return found[0] is not None and whole == tuple(itertools.chain(*apart))

    async def _parents(self, read: Reading, beside: list[HeldMessage]) -> list[ReadMessage]:
        """Encode a call's parents, and return them; those for it alone are added to `beside`."""
        texts = dict.fromkeys(text for part in read.parts if (text := self._apart(part)))
        # At once: one after the other, each would wait for a step of the engine.
        links, *alone = await asyncio.gather(
            self._chain(read.chain, read.before), *(self._alone(text) for text in texts)
        )
        apart = dict(zip(texts, alone, strict=True))
        parents = [*_read_with(read.before), *links]
        for part in read.parts:
            if isinstance(part, Answer):
                assert part.span is not None and part.message is not None
                parents.append((part.message, *part.span))
            elif text := self._apart(part):
                parents += apart[text]
            else:
                assert isinstance(part, str)
                beside.append(await self._prefill(part, tuple(parents), False))
                parents.append(beside[-1])
        return parents

    def _apart(self, part: Part) -> str | None:
        """Text of a part that is encoded alone for all calls that read it; None: it is not."""
        if isinstance(part, Told):
            return part.text
        return part if isinstance(part, str) and part in self.alone else None

    def forget(self) -> None:
        """Forget all messages, for the worker has lost them."""
        self._links.clear()
        self._pinned.clear()
        self._is_loaded = False

    async def free(self, keep_pinned: bool = True) -> None:
        """Free shared messages, also those under way for a call that was refused meanwhile."""
        coming = [link for link in self._links.values() if not link.done()]
        await asyncio.gather(*coming, return_exceptions=True)
        made = {key: link for key, link in self._links.items() if _is_made(link)}
        kept = self._pinned if keep_pinned else set()
        self._links = {key: link for key, link in made.items() if link.result().id in kept}
        unpinned = [link.result() for key, link in made.items() if key not in self._links]
        await self.worker.free(unpinned)

    async def _chain(self, chain: Key, before: Answer | None = None) -> list[HeldMessage]:
        """Encode a chain, behind what an earlier call has read and said."""
        parents = _read_with(before)
        base = before.message.id if before is not None and before.message is not None else None
        links: list[HeldMessage] = []
        for i, text in enumerate(chain):
            key = ("chain", base, chain[: i + 1])
            links.append(await self._shared(key, text, (*parents, *links)))
        return links

    async def _alone(self, text: str) -> list[HeldMessage]:
        """Encode a text by itself; return its message alone."""
        return [await self._shared(("alone", text), text, ())]

    async def _shared(
        self, key: Hashable, text: str, parents: Sequence[ReadMessage]
    ) -> HeldMessage:
        """Encode a message once; all calls that need it wait for it."""
        link = self._links.get(key)
        if link is None or (link.done() and not _is_made(link)):
            self.num_shared += 1
            link = self._links[key] = asyncio.ensure_future(self._prefill(text, parents, True))
        # Shielded: that one of several readers gives up does not stop it for the others.
        return await asyncio.shield(link)

    async def _prefill(self, text: str, parents: Sequence[ReadMessage], exact: bool) -> HeldMessage:
        message = await self.worker.prefill(text, parents, exact)
        self.num_tokens += message.num_tokens
        return message


def _read_with(before: Answer | None) -> list[ReadMessage]:
    """Parents of an earlier call, and its own message without the token that ended it."""
    if before is None:
        return []
    assert before.span is not None and before.message is not None
    return [*before.parents, (before.message, 0, before.span[1])]


def _is_made(link: asyncio.Future[HeldMessage]) -> bool:
    """Return whether the message is encoded."""
    return link.done() and not link.cancelled() and link.exception() is None

# SPDX-License-Identifier: Apache-2.0
"""Messages that several calls of a run read, encoded once on each worker, and freed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.planner.execute.read import Key, Part, Reading, Told
from vllm_choreo.planner.execute.retry import MESSAGES_GONE
from vllm_choreo.planner.workers.worker import Answer, HeldMessage, ReadMessage, Uri, Worker

_LOGGER = logging.getLogger(__name__)

# So many shared messages of a worker are kept for calls to come, beside those that are pinned: a
# session holds some thousands (`max_messages_per_session`), and a batch may have more beginnings.
MAX_SHARED = 1000


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
        self._links: dict[Hashable, asyncio.Future[HeldMessage]] = {}  # the last used one is last
        self._used: dict[Hashable, int] = {}  # the last call that had begun at a link's last use
        self._last_call = 0
        self._running: set[int] = set()
        self._num_readers: Counter[str] = Counter()  # answers that are held, by message
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
        number = self._last_call = self._last_call + 1
        self._running.add(number)
        try:
            parents = await self._parents(read, beside)
            answer = await worker.decode(read.header, parents, read.exact, sampling)
        except BaseException:
            await worker.free(beside)
            raise
        finally:
            self._running.remove(number)
        answer = replace(answer, parents=tuple(parents), beside=tuple(beside))
        self._num_readers.update(_ids(answer))
        await self._free_idle()
        return answer

    def release(self, answer: Answer) -> None:
        """Note that no call will go on from an answer."""
        self._num_readers.subtract(_ids(answer))

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
        self._used.clear()
        self._num_readers.clear()
        self._pinned.clear()
        self._is_loaded = False

    async def free(self, keep_pinned: bool = True) -> None:
        """Free shared messages, also those under way for a call that was refused meanwhile."""
        coming = [link for link in self._links.values() if not link.done()]
        await asyncio.gather(*coming, return_exceptions=True)
        made = {key: link for key, link in self._links.items() if _is_made(link)}
        kept = self._pinned if keep_pinned else set()
        self._links = {key: link for key, link in made.items() if link.result().id in kept}
        self._used = {key: used for key, used in self._used.items() if key in self._links}
        self._num_readers.clear()
        unpinned = [link.result() for key, link in made.items() if key not in self._links]
        await self.worker.free(unpinned)

    async def _free_idle(self) -> None:
        """Free those that no call reads, but for the last used ones, if there are too many."""
        if len(self._links) - len(self._pinned) <= MAX_SHARED:
            return
        first = min(self._running, default=self._last_call + 1)
        idle = [key for key in self._links if self._is_idle(key, first)][: MAX_SHARED // 2]
        for key in idle:
            del self._used[key]
        freed = [self._links.pop(key).result() for key in idle]
        with contextlib.suppress(*MESSAGES_GONE):  # then there is nothing to be freed
            await self.worker.free(freed)

    def _is_idle(self, key: Hashable, first: int) -> bool:
        """Return whether no call reads a message.

        Args:
            key: key of the message.
            first: number of the first running call.
        """
        if not _is_made(link := self._links[key]) or self._used.get(key, first) >= first:
            return False
        message = link.result()
        return message.id not in self._pinned and self._num_readers[message.id] <= 0

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
        link = self._links.pop(key, None)
        if link is None or (link.done() and not _is_made(link)):
            self.num_shared += 1
            link = asyncio.ensure_future(self._prefill(text, parents, True))
        self._links[key], self._used[key] = link, self._last_call
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


def _ids(answer: Answer) -> set[str]:
    """Ids of the messages that a call has read."""
    return {(read[0] if isinstance(read, tuple) else read).id for read in answer.parents}


def _is_made(link: asyncio.Future[HeldMessage]) -> bool:
    """Return whether the message is encoded."""
    return link.done() and not link.cancelled() and link.exception() is None

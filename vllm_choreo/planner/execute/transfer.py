# SPDX-License-Identifier: Apache-2.0
"""Moves of answers, keys and values, from the worker that generated them to those that read them.

A move costs no encoding, and the reader reads what the writer has written. Where a move fails, the
answer is encoded again from its text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm_choreo.planner.workers.worker import Answer, HeldMessage, Worker

_LOGGER = logging.getLogger(__name__)


class Moves:
    """Moves of answers in one run, at most one for each answer and worker.

    Args:
        workers: workers between which answers are moved.

    Attributes:
        num_moved: answers that were moved.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.num_moved = 0
        self._workers = workers
        self._moved: dict[tuple[int, int], asyncio.Future[Answer | None]] = {}

    def pays(self, answer: Answer, home: int, worker: int) -> bool:
        """Return whether moving an answer is cheaper than encoding its text again."""
        least = max(self._workers[number].min_moved_tokens for number in (home, worker))
        return home != worker and answer.span is not None and answer.num_out >= least

    def at(self, call: int, worker: int) -> Answer | None:
        """Answer to a call as it was moved to a worker; None: it was not, or not yet."""
        moved = self._moved.get((call, worker))
        return moved.result() if moved is not None and moved.done() else None

    async def bring(self, call: int, answer: Answer, home: int, worker: int) -> None:
        """Move an answer to a worker, once; all calls that need it there wait for that move."""
        key = (call, worker)
        if key not in self._moved:
            self._moved[key] = asyncio.ensure_future(self._move(answer, home, worker))
        await asyncio.shield(self._moved[key])

    async def _move(self, answer: Answer, home: int, worker: int) -> Answer | None:
        try:
            assert answer.message is not None, "it has a span"
            given = await self._workers[home].give(answer.message)
            message = await self._workers[worker].take(given)
        except Exception as error:  # of either worker, or on the way: it is encoded again
            _LOGGER.warning("An answer could not be moved from a worker to another: %s", error)
            return None
        self.num_moved += 1
        return replace(answer, message=message, beside=())

    def forget(self, worker: int) -> None:
        """Forget the answers that were moved to a worker, for it has lost its messages."""
        self._moved = {key: moved for key, moved in self._moved.items() if key[1] != worker}

    def pop(self, calls: Iterable[int]) -> list[tuple[int, HeldMessage]]:
        """Remove the moved answers to some calls; return (worker, message) of each, to be freed."""
        chosen = set(calls)
        keys = [key for key in self._moved if key[0] in chosen]
        found = [(key[1], moved) for key in keys if (moved := self._moved.pop(key)).done()]
        return [
            (worker, answer.message)
            for worker, moved in found
            if not moved.cancelled() and (answer := moved.result()) and answer.message
        ]

    async def settle(self) -> None:
        """Wait for moves under way: a message that arrives after the run would never be freed."""
        await asyncio.gather(*self._moved.values(), return_exceptions=True)

    @property
    def calls(self) -> set[int]:
        """Calls whose answers were moved to another worker."""
        return {call for call, _ in self._moved}

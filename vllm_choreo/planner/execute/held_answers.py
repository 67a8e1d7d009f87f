# SPDX-License-Identifier: Apache-2.0
"""Answers of a run: which worker holds the message of each, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from vllm_choreo.planner.execute.retry import MESSAGES_GONE
from vllm_choreo.planner.execute.transfer import Moves
from vllm_choreo.planner.plan import Plan
from vllm_choreo.planner.workers.worker import Answer, HeldMessage, Worker


class HeldAnswers:
    """Answers of one run: those of a single query are freed with it, the others at the end.

    Args:
        plan: calls, and the queries that need them.
        workers: holders of the messages.
        on_free: is told the worker and the answer, of each that is freed with its query.
    """

    def __init__(
        self, plan: Plan, workers: Sequence[Worker], on_free: Callable[[int, Answer], None]
    ) -> None:
        self._workers, self._on_free = workers, on_free
        self._moves = Moves(workers)
        self._held: dict[int, tuple[int, Answer]] = {}
        self._shared: set[int] = set()
        self._frees: list[asyncio.Task[None]] = []
        self._own: dict[int, list[int]] = {}  # calls that one query alone has asked for
        for call in plan.prompts:
            task = plan.tasks[call]
            if task.num_queries == 1:
                self._own.setdefault(task.query, []).append(call)

    @property
    def num_moved(self) -> int:
        """Number of answers that were moved from one worker to another."""
        return self._moves.num_moved

    def add(self, call: int, worker: int, answer: Answer) -> None:
        """Note the answer that a worker has given to a call."""
        self._held[call] = (worker, answer)

    def share(self, call: int) -> None:
        """Keep an answer until the end of the run: an equal call has it, too."""
        self._shared.add(call)

    def made_by(self, call: int, worker: int) -> Answer | None:
        """Answer to a call, if this worker generated it and its message can be read."""
        home, answer = self._held.get(call, (-1, None))
        return answer if home == worker and answer is not None and answer.span else None

    def at(self, call: int, worker: int) -> Answer | None:
        """Answer to a call as a worker can read it: generated or moved there; None: it cannot."""
        if call not in self._held:
            return None
        home, answer = self._held[call]
        found = answer if home == worker else self._moves.at(call, worker)
        return found if found is not None and found.span is not None else None

    async def bring(self, call: int, worker: int) -> None:
        """Move an answer to a worker, where that pays."""
        if call in self._held:
            home, answer = self._held[call]
            if self._moves.pays(answer, home, worker):
                await self._moves.bring(call, answer, home, worker)

    def lose(self, worker: int) -> None:
        """Forget the answers that a worker held, for it has lost its messages."""
        self._moves.forget(worker)
        self._held = {call: held for call, held in self._held.items() if held[0] != worker}

    def free_query(self, query: int) -> None:
        """Free the answers that only this query needed; it is done."""
        mine = [call for call in self._own.pop(query, ()) if call not in self._shared]
        done = [call for call in mine if call in self._held]
        by_worker: dict[int, list[HeldMessage]] = {}
        for call in done:
            worker, answer = self._held.pop(call)
            self._on_free(worker, answer)
            by_worker.setdefault(worker, []).extend(answer.messages())
        for worker, message in self._moves.pop(done):
            by_worker.setdefault(worker, []).append(message)
        for worker, messages in by_worker.items():
            self._frees.append(asyncio.ensure_future(self._free(worker, messages)))

    async def free_all(self) -> None:
        """Free all messages that are left of the run."""
        await self._moves.settle()
        for worker, message in self._moves.pop(self._moves.calls):
            await self._free(worker, [message])
        for number in range(len(self._workers)):
            left = [answer.messages() for at, answer in self._held.values() if at == number]
            await self._free(number, [message for messages in left for message in messages])
        await asyncio.gather(*self._frees)

    async def _free(self, worker: int, messages: list[HeldMessage]) -> None:
        with contextlib.suppress(*MESSAGES_GONE):  # then there is nothing to be freed
            await self._workers[worker].free(messages)

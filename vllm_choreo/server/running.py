# SPDX-License-Identifier: Apache-2.0
"""The calls of one request, from their submission until the client has its answer or went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from starlette.requests import Request
from vllm.logger import init_logger

from vllm_choreo.api.pending import Pending
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import CallSpec, Result
from vllm_choreo.semantics.message import Message, Piece
from vllm_choreo.server.errors import as_choreo_error
from vllm_choreo.server.sessions import OpenSession, Sessions, unknown_session

logger = init_logger("vllm.choreo.server")


class Run:
    """Calls that run for a request.

    `leave` must be called when the request is over. Calls that are not complete by then are ended,
    and messages of which the client did not hear the end are freed: a client that went away leaves
    nothing behind.
    """

    def __init__(self, sessions: Sessions, session: OpenSession, pending: Sequence[Pending]):
        self.pending = pending
        self._sessions = sessions
        self._session = session
        self._results: dict[int, Result] = {}
        session.num_users += 1

    @classmethod
    async def start(
        cls, sessions: Sessions, session: OpenSession, calls: Sequence[CallSpec]
    ) -> Run:
        """Submit calls.

        Raises:
            UnknownSessionError: the session was closed meanwhile.
            ChoreoError: one of them is illegal; nothing was submitted.
        """
        try:
            pending = await session.choreography.submit_all(calls)
        except ChoreoError:
            if not sessions.is_open(session):  # it was closed since it was looked up
                raise unknown_session() from None
            raise
        return cls(sessions, session, pending)

    async def results(self) -> list[Result]:
        """What each call came to, when all are over."""
        await asyncio.gather(*(self._end_of(index) for index in range(len(self.pending))))
        return [self._results[index] for index in range(len(self.pending))]

    async def events(self) -> AsyncIterator[tuple[int, Piece | Result]]:
        """What the calls generate, as it comes, each with the index of its call.

        The last event of a call is its result; pieces have no message.
        """
        # One place: a reader who is slow gets fewer and longer pieces, not a growing queue.
        queue: asyncio.Queue[tuple[int, Piece | Result]] = asyncio.Queue(1)
        tasks = [
            asyncio.create_task(self._pass_on(index, queue)) for index in range(len(self.pending))
        ]
        try:
            num_running = len(tasks)
            while num_running:
                index, event = await queue.get()
                num_running -= not isinstance(event, Piece)
                yield index, event
        finally:
            for task in tasks:
                task.cancel()

    async def _pass_on(self, index: int, queue: asyncio.Queue[tuple[int, Piece | Result]]) -> None:
        with suppress(Exception):  # which are told by `_end_of`
            async for piece in self.pending[index].pieces():
                if piece.text or piece.token_ids:
                    await queue.put((index, Piece(piece.text, piece.token_ids)))
        await queue.put((index, await self._end_of(index)))

    async def _end_of(self, index: int) -> Result:
        pending = self.pending[index]
        try:
            result = await pending.result()
        except Exception as error:
            result = as_choreo_error(error) or self._own_error(error)
        if isinstance(result, ChoreoError) and not self._sessions.is_open(self._session):
            result = unknown_session()  # it was closed meanwhile
        self._results[index] = result
        self._sessions.ended(self._session, pending.call.params.kind, result)
        if isinstance(result, ChoreoError):
            self._sessions.refused(result)
        return result

    def _own_error(self, error: Exception) -> ChoreoError:
        logger.error("a call ended with an error of the server", exc_info=error)
        return ChoreoError("the server failed; its log tells why")

    def leave(self, *, is_answered: bool) -> None:
        """The request is over.

        Args:
            is_answered: whether the client has all results.
        """
        if is_answered:
            self._release()
        else:
            self._sessions.in_background(self._drop())

    def _release(self) -> None:
        with self._session.used():  # its time to live begins anew
            self._session.num_users -= 1

    async def _drop(self) -> None:
        choreography = self._session.choreography
        try:
            await choreography.cancel(self.pending)
            for index, pending in enumerate(self.pending):
                if index not in self._results:
                    self._sessions.abandoned(self._session, pending.call.params.kind)
            made = [result for result in self._results.values() if isinstance(result, Message)]
            with suppress(ChoreoError):  # somebody else freed one, or closed the session
                await choreography.free(*made)
        finally:
            self._release()


async def unless_gone(request: Request, run: Run) -> list[Result] | None:
    """The results of `run`, or None if the client goes away before."""
    work = asyncio.ensure_future(run.results())
    gone = asyncio.ensure_future(_disconnected(request))
    is_answered = False
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        is_answered = work.done()
        return work.result() if is_answered else None
    finally:
        work.cancel()
        gone.cancel()
        run.leave(is_answered=is_answered)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

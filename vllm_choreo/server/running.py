# SPDX-License-Identifier: Apache-2.0
"""Calls of one request, until the client has its answer or went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Unpack

from starlette.requests import Request
from vllm.logger import init_logger

from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import CallSpec, Result
from vllm_choreo.semantics.call_options import Content, DecodeOptions
from vllm_choreo.semantics.message import Message, Piece
from vllm_choreo.server.errors import as_choreo_error
from vllm_choreo.server.sessions import OpenSession, Sessions, unknown_session

logger = init_logger("vllm.choreo.server")


class Run:
    """The calls of a request.

    It keeps the session from expiring as long as there is the request, and `leave` must be called
    when that is over. Calls that are not complete by then are ended, and messages of which the
    client did not hear are freed: a client that went away leaves nothing behind.

        Run(sessions, session)      the session is kept open
          submit(calls)             calls that the session runs: `results`, or `events`, tell how
                                    they end
          begin, submitted,         a call whose request somebody else hands to the engine, and
            conclude                reads the outputs of
        leave(is_answered=)         nothing is left that nobody was told of

    Attributes:
        pending: the calls.
        sessions: open sessions of the server.
    """

    def __init__(self, sessions: Sessions, session: OpenSession) -> None:
        self.pending: list[Pending] = []
        self.sessions = sessions
        self._session = session
        self._results: dict[str, Result] = {}  # by the id of the call
        session.enter()

    # -- calls that the session runs ---------------------------------------------------------

    async def submit(self, calls: Sequence[CallSpec]) -> None:
        """Submit calls that the session runs.

        Raises:
            UnknownSessionError: the session was closed meanwhile.
            ChoreoError: one of the calls is illegal; nothing was submitted.
        """
        await self.fetch(span.id for call in calls for span in call.parents)
        try:
            self.pending += await self._session.choreography.submit_all(calls)
        except ChoreoError as error:
            raise self._as_told(error) from None

    async def fetch(self, named: Iterable[str]) -> None:
        """Load messages that other servers have saved under these names; see `PairExchange`."""
        if self.sessions.exchange is not None:
            await self.sessions.exchange.fetch(self._session, named)

    async def _export(self, result: Result) -> None:
        """Save a message that a client has named, for other servers to read it."""
        if self.sessions.exchange is not None:
            await self.sessions.exchange.export(self._session, result)

    async def results(self) -> list[Result]:
        """Results of the calls, in their order, when all are over."""
        return list(await asyncio.gather(*map(self._end_of, self.pending)))

    async def events(self) -> AsyncIterator[tuple[int, Piece | Result]]:
        """Yield what the calls generate, as it comes, each with the index of its call.

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
        pending = self.pending[index]
        with suppress(Exception):  # which are told by `_end_of`
            async for piece in pending.pieces():
                if piece.text or piece.token_ids:
                    await queue.put((index, Piece(piece.text, piece.token_ids)))
        await queue.put((index, await self._end_of(pending)))

    async def _end_of(self, pending: Pending) -> Result:
        try:
            result = await pending.result()
        except Exception as error:
            result = as_choreo_error(error) or self._own_error(error)
        await self._export(result)
        result = self._ended(pending, result)
        if isinstance(result, ChoreoError):
            self.refused(result)
        return result

    def _own_error(self, error: Exception) -> ChoreoError:
        logger.error("a call ended with an error of the server", exc_info=error)
        return ChoreoError("the server failed; its log tells why")

    # -- a call whose request somebody else runs ---------------------------------------------

    def begin(self, header: Content, **arguments: Unpack[DecodeOptions]) -> Pending:
        """Reserve a decode: see `AsyncChoreography.begin`.

        Raises:
            UnknownSessionError: the session was closed meanwhile.
            ChoreoError: the call is illegal.
        """
        try:
            pending = self._session.choreography.begin(header, **arguments)
        except ChoreoError as error:
            raise self._as_told(error) from None
        self.pending.append(pending)
        return pending

    async def place(self, pending: Pending) -> int | None:
        """Engine of a call that `begin` reserved: see `AsyncChoreography.place`."""
        return await self._session.choreography.place(pending)

    async def submitted(self, pending: Pending, queue: OutputQueue) -> None:
        """Enter a call whose request the engine has; its outputs arrive in `queue`."""
        await self._session.choreography.submitted(pending, queue)

    async def conclude(self, pending: Pending, outcome: Outcome) -> Result:
        """Result of a call, from the last output of its request."""
        try:
            result: Result = await self._session.choreography.conclude(pending, outcome)
        except ChoreoError as error:
            result = error
        await self._export(result)
        return self._ended(pending, result)

    # -- how they end ------------------------------------------------------------------------

    def _as_told(self, error: ChoreoError) -> ChoreoError:
        """`error`, or, if the session was closed, the error that says so."""
        return error if self.sessions.is_open(self._session) else unknown_session()

    def _ended(self, pending: Pending, result: Result) -> Result:
        if isinstance(result, ChoreoError):
            result = self._as_told(result)
        self._results[pending.id] = result
        self.sessions.ended(self._session, pending.call.params.kind, result)
        return result

    def refused(self, error: ChoreoError) -> None:
        """Count an error that is told inside an answer."""
        self.sessions.refused(error)

    def leave(self, *, is_answered: bool) -> None:
        """End the request; unless it is answered, end its calls and free their messages.

        Args:
            is_answered: True if the client has all results.
        """
        if is_answered or not self.pending:
            self._session.leave()
        else:
            self.sessions.in_background(self._drop())

    async def _drop(self) -> None:
        choreography = self._session.choreography
        try:
            await choreography.cancel(self.pending)
            for pending in self.pending:
                if pending.id not in self._results:
                    self.sessions.abandoned(self._session, pending.call.params.kind)
            made = [result for result in self._results.values() if isinstance(result, Message)]
            with suppress(ChoreoError):  # somebody else freed one, or closed the session
                await choreography.free(*made)
        finally:
            self._session.leave()


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

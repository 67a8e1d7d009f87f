# SPDX-License-Identifier: Apache-2.0
"""`Takeover`: an ASGI app around the server's, by which ingresses go on for one another.

Before the first request of a tenant, what another ingress had of it is taken over. Before any part
of an answer is sent, what it tells of is in the journal: an ingress that ends takes nothing with it
of which a client knows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from vllm.logger import init_logger

from vllm_choreo.errors import ChoreoError, EngineRestartedError, UnknownKeyError
from vllm_choreo.server.errors import error_response
from vllm_choreo.server.tenants import tenant_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from vllm_choreo.cluster.journal import JournalWriter
    from vllm_choreo.server.sessions import Sessions

logger = init_logger("vllm.choreo.cluster")


class Takeover:
    """The app of an ingress.

    Args:
        app: the server's.
        sessions: its sessions.
        writer: writer of its journal.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, writer: JournalWriter) -> None:
        self._app = app
        self._sessions = sessions
        self._writer = writer
        self._taken: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        writer.on_lost = self._lose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant = tenant_of(HTTPConnection(scope))
        except UnknownKeyError:  # it has no sessions
            await self._app(scope, receive, send)
            return
        await self._have(tenant)
        is_started = is_lost = False

        async def tell(message: Message) -> None:
            nonlocal is_started, is_lost
            is_lost = is_lost or not await self._is_written(tenant)
            if not is_lost:
                is_started = True
                await send(message)

        await self._app(scope, receive, tell)
        if is_lost:
            error = EngineRestartedError(
                "another ingress serves this API key now: send the request again",
                parameter="ingress",
            )
            if is_started:
                raise error  # the connection breaks: it must not look like a whole answer
            await error_response(error)(scope, receive, send)

    async def _have(self, tenant: str) -> None:
        """Have a tenant's sessions here; those who ask at a time wait for one takeover."""
        task = self._taken.get(tenant)
        if task is None:
            task = self._taken[tenant] = asyncio.ensure_future(self._take_over(tenant))
        try:
            await asyncio.shield(task)
        except Exception:
            self._taken.pop(tenant, None)
            raise

    async def _take_over(self, tenant: str) -> None:
        if tenant in self._leaving:
            await self._leaving[tenant]
        for record in await self._writer.take_over(tenant):
            try:
                self._sessions.restore(record)
            except ChoreoError as error:  # limits that are lower now
                logger.warning("session %s is not taken over: %s", record.id, error)

    async def _is_written(self, tenant: str) -> bool:
        """Write what is to be told; False: another ingress has taken the tenant over."""
        await self._writer.flush()
        return tenant in self._taken

    def _lose(self, tenant: str) -> None:
        """Leave a tenant to the ingress that has taken it over."""
        self._taken.pop(tenant, None)
        task = self._leaving[tenant] = asyncio.ensure_future(self._sessions.abandon(tenant))
        task.add_done_callback(lambda _: self._leaving.pop(tenant, None))

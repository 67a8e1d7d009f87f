# SPDX-License-Identifier: Apache-2.0
"""Open sessions of all tenants.

They are opened within limits, found by their tenant alone, and closed when nobody used them for
their time to live.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm.logger import init_logger

from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.restored import SessionJournal, SessionRecord
from vllm_choreo.config import ServerConfig
from vllm_choreo.errors import ChoreoError, LimitError, UnknownSessionError
from vllm_choreo.repair.pair_rule import ChosenCell
from vllm_choreo.repair.session_rules import check_sent
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import RepairGiven, SessionOptions
from vllm_choreo.server.answers import Mode, Placement, Repair, SessionAnswer
from vllm_choreo.server.observer import Observer
from vllm_choreo.server.work_pool import WorkPool
from vllm_choreo.wire.calls import adapter_name
from vllm_choreo.wire.messages import usage_json

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.choreo.server")

_SWEEP_SECONDS = 1.0
# Of a session whose opener gives none.
DEFAULT_OPTIONS = SessionOptions()


@dataclass(eq=False)
class OpenSession:
    """A session that is open, and who may use it.

    Attributes:
        choreography: runs its calls; `choreography.session` is its id.
        tenant: the tenant that may use it.
        adapter: name of the adapter of calls that name none.
        created: time of its opening, in seconds since 1970.
        ttl_seconds: seconds that it stays open unused.
    """

    choreography: AsyncChoreography
    tenant: str
    ttl_seconds: float
    adapter: str | None = None
    created: float = field(default_factory=time.time)
    _num_users: int = 0  # it does not expire while there is one
    _last_used: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.choreography.session

    @property
    def expires_in(self) -> float:
        """Seconds until it expires if nobody uses it; negative if it has."""
        since = 0.0 if self._num_users else time.monotonic() - self._last_used
        return self.ttl_seconds - since

    def enter(self) -> None:
        """Keep the session from expiring until `leave`."""
        self._num_users += 1

    def leave(self) -> None:
        """End what `enter` began; the time to live begins anew."""
        assert self._num_users > 0, "left more often than entered"
        self._num_users -= 1
        self._last_used = time.monotonic()

    @contextmanager
    def used(self) -> Iterator[AsyncChoreography]:
        """Enter the session, and leave it at the end."""
        self.enter()
        try:
            yield self.choreography
        finally:
            self.leave()


class Exchanger(Protocol):
    """Exchange of messages with servers of other models; see `PairExchange`.

    Attributes:
        rule: rule of sessions that have none of their own.
    """

    rule: RepairGiven

    async def export(self, session: OpenSession, result: Result) -> None:
        """Save the result of a session's call for the other servers."""

    async def fetch(self, session: OpenSession, named: Iterable[str]) -> None:
        """Load the messages that a session's call names from the other servers."""

    async def export_part(self, session: OpenSession, message: Message, key: bytes) -> None:
        """Save a part of a chat for the other servers, which find it by a digest."""

    async def fetch_part(
        self, session: OpenSession, key: bytes, token_ids: Sequence[int]
    ) -> Message | None:
        """Load a part of a chat that another server has saved, or return None."""


class Sessions:
    """Every open session.

    Args:
        async_llm: vLLM's AsyncLLM.
        config: the limits.
        model: the name under which the model is served.

    Attributes:
        observers: counters of what happens; append to it.
        exchange: exchange with servers of other models; None: there is none.
        work: pool for work that grows with what a tenant sends.
        journal: journal from which another server goes on with the sessions; None: there is none.
    """

    def __init__(self, async_llm: AsyncLLM, config: ServerConfig, model: str) -> None:
        self.config = config
        self.model = model
        self.max_model_len: int = async_llm.model_config.max_model_len
        self.observers: list[Observer] = []
        self.exchange: Exchanger | None = None
        self.work = WorkPool()
        self.journal: SessionJournal | None = None
        self._llm = async_llm
        self._sessions: dict[tuple[str, str], OpenSession] = {}
        self._defaults: dict[str, str] = {}  # tenant -> id
        self._background: set[asyncio.Task[Any]] = set()

    # -- opening and finding -----------------------------------------------------------------

    def open(
        self,
        tenant: str,
        options: SessionOptions = DEFAULT_OPTIONS,
        *,
        is_limited: bool = True,
        is_journalled: bool = True,
    ) -> OpenSession:
        """Open a session.

        Args:
            tenant: owner of the session.
            options: options of the session, as its caller gave them.
            is_limited: True if the limits of a session hold for its messages.
            is_journalled: True if another server may go on with it.

        Raises:
            LimitError: too many are open, or the time to live is too long.
            ChoreoError: no such mode, placement or rule of repair, or an adapter that does not fit.
        """
        config = self.config
        self._close_expired()
        own = sum(1 for owner, _ in self._sessions if owner == tenant)
        _check_limit("max_sessions_per_tenant", own + 1, config.max_sessions_per_tenant)
        _check_limit("max_sessions", len(self._sessions) + 1, config.max_sessions)
        ttl = options.ttl_seconds
        ttl = config.session_ttl_seconds if ttl is None else ttl
        _check_limit("session_ttl_seconds", ttl, config.session_ttl_seconds)
        check_sent(options.repair)
        repair = options.repair
        if repair is None and options.mode == "choreo" and self.exchange is not None:
            repair = self.exchange.rule
        options = replace(
            options,
            tenant=tenant,
            repair=repair,
            limits=config if is_limited else None,
            on_choice=self.chosen,
        )
        choreography = AsyncChoreography(self._llm, options=options)
        session = OpenSession(choreography, tenant, ttl, adapter_name(options.adapter))
        self._sessions[tenant, session.id] = session
        for observer in self.observers:
            observer.opened()
        if self.journal is not None and is_journalled and options.mode != "baseline":
            self.journal.opened(session.id, options)
        return session

    def restore(self, record: SessionRecord) -> None:
        """Go on with a session of another server."""
        session = self.open(record.tenant, record.options)
        session.choreography.restore(record)
        if record.is_default:
            self._set_default(session)

    def session(self, tenant: str, session_id: str) -> OpenSession:
        """The open session of this id.

        Raises:
            UnknownSessionError: there is none that belongs to `tenant`; the error is the same
                whatever the id, so that it tells nothing about sessions of others.
        """
        session = self._sessions.get((tenant, session_id))
        if session is None or session.expires_in <= 0:
            raise unknown_session()
        return session

    def default_session(self, tenant: str) -> OpenSession:
        """The session of requests that name none.

        It is opened when it is first used, or used again after it was closed.

        Raises:
            LimitError: too many sessions are open.
        """
        try:
            return self.session(tenant, self._defaults.get(tenant, ""))
        except UnknownSessionError:
            session = self.open(tenant)
            self._set_default(session)
            return session

    def _set_default(self, session: OpenSession) -> None:
        self._defaults[session.tenant] = session.id
        if self.journal is not None:
            self.journal.used_by_default(session.id)

    def opened_default(self, tenant: str) -> OpenSession | None:
        """The session of requests that name none, if it is open."""
        session = self._sessions.get((tenant, self._defaults.get(tenant, "")))
        return session if session is not None and session.expires_in > 0 else None

    def is_open(self, session: OpenSession) -> bool:
        """Return whether a session has not been closed."""
        return (session.tenant, session.id) in self._sessions

    def is_usable(self, session: OpenSession) -> bool:
        """Return whether a session has neither been closed nor expired."""
        return self.is_open(session) and session.expires_in > 0

    async def describe(self, session: OpenSession) -> SessionAnswer:
        """The session object."""
        choreography = session.choreography
        stats = await choreography.counts()
        num_tokens = [message.num_tokens for message in choreography.messages()]
        return {
            "id": session.id,
            "object": "choreo.session",
            "created": int(session.created),
            "mode": cast("Mode", choreography.mode),
            "ttl_seconds": session.ttl_seconds,
            "expires_at": int(time.time() + session.ttl_seconds),
            "max_model_len": self.max_model_len,
            "model": self.model,
            "adapter": session.adapter,
            "placement": cast("Placement | None", choreography.placement),
            "repair": cast("Repair | None", choreography.repair),
            "usage": {
                "messages": len(num_tokens),
                "tokens": sum(num_tokens),
                # In baseline mode the engine knows no messages.
                "resident_tokens": stats.get("num_resident_tokens", 0),
                "pinned_messages": stats.get("num_pinned", 0),
                "max_messages": self.config.max_messages_per_session,
                "max_tokens": self.config.max_tokens_per_session,
            },
        }

    # -- closing -----------------------------------------------------------------------------

    async def close(self, session: OpenSession) -> None:
        """Close a session: end its calls, free its messages. Closing twice does nothing."""
        if self.is_open(session):
            self._forget(session, expired=False)
            await session.choreography.close()

    async def abandon(self, tenant: str) -> None:
        """End a tenant's calls here, and forget its sessions: another server goes on with them."""
        for session in [s for s in self._sessions.values() if s.tenant == tenant]:
            self._forget(session, expired=False)
            await session.choreography.abandon()

    def _forget(self, session: OpenSession, *, expired: bool) -> None:
        del self._sessions[session.tenant, session.id]
        if self._defaults.get(session.tenant) == session.id:
            del self._defaults[session.tenant]
        if self.journal is not None:
            self.journal.closed(session.id)
        for observer in self.observers:
            observer.closed(expired=expired)

    def start_expiry(self) -> None:
        """Close expired sessions from now on, in the running event loop."""
        self.in_background(self._expire())

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._close_expired()

    def _close_expired(self) -> None:
        for session in [s for s in self._sessions.values() if s.expires_in <= 0]:
            logger.info("%s", _line(event="choreo.session.expired", session=session.id))
            self._forget(session, expired=True)
            # A task of its own: nobody waits for an engine that is slow to answer.
            self.in_background(session.choreography.close())

    def in_background(self, work: Awaitable[object]) -> None:
        """Run a coroutine to its end whatever becomes of the request that asks for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("in the background: %r", error)

    # -- what happened -----------------------------------------------------------------------

    def ended(self, session: OpenSession, kind: str, result: Message | ChoreoError) -> None:
        """Log and count how a call ended; `kind` is "prefill" or "decode". Logs no text."""
        line: dict[str, Any] = {"event": "choreo.call", "session": session.id, "type": kind}
        if isinstance(result, ChoreoError):
            line |= {"error": type(result).__name__, "param": result.parameter or None}
            self._failed(kind, "error")
        else:
            line |= {"message": result.id, **_numbers(result)}
            for observer in self.observers:
                observer.finished(kind, result)
        logger.info("%s", _line(**line))

    def abandoned(self, session: OpenSession, kind: str) -> None:
        """Log and count a call whose client went away before it was over."""
        line = {"event": "choreo.call", "session": session.id, "type": kind}
        logger.info("%s", _line(**line, error="abandoned", param=None))
        self._failed(kind, "abandoned")

    def _failed(self, kind: str, outcome: str) -> None:
        for observer in self.observers:
            observer.failed(kind, outcome)

    def chosen(self, choice: ChosenCell) -> None:
        """Count what the profile of a pair has chosen for a call."""
        for observer in self.observers:
            observer.chosen(choice)

    def refused(self, error: ChoreoError) -> None:
        """Count an error with which a client is answered."""
        for observer in self.observers:
            observer.refused(error)


def unknown_session() -> UnknownSessionError:
    """The one answer for every id that is not a session of the tenant's own."""
    return UnknownSessionError(
        "no such session: it was never opened, was closed, was not used for its time to live, or "
        "ended with an earlier run of the server; open one with POST /v1/choreo/sessions",
        parameter="session",
    )


def _check_limit(setting: str, value: float, limit: float) -> None:
    if value > limit:
        raise LimitError(
            f"the limit is {limit:g}; close sessions or ask for less, or raise the server's "
            f"setting choreo.server.{setting}",
            parameter=setting,
            value=value,
        )


def _numbers(message: Message) -> dict[str, Any]:
    metrics = message.metrics
    times = {"waiting": metrics.waiting, "ttft": metrics.ttft, "latency": metrics.latency}
    rounded = {name: None if s is None else round(s, 4) for name, s in times.items()}
    return {
        "num_tokens": message.num_tokens,
        "num_parents": len(message.parents),
        "finish_reason": message.finish_reason,
        "usage": usage_json(message),
        "metrics": rounded,
    }


def _line(**values: object) -> str:
    """One line of JSON; newlines inside are escaped by it."""
    return json.dumps(values, separators=(",", ":"))

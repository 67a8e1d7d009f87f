# SPDX-License-Identifier: Apache-2.0
"""Journal of a fleet's sessions: an actor beside the ingresses, from which one goes on for another.

    ingress a   ---- writes, before it answers ---->   journal   ---- records ---->   ingress b
    (ended)          opened, made, freed, closed                  takes a tenant over

A tenant's sessions are in one ingress at a time. Whoever takes them over is the only one whose
writes are taken from then on. An actor that ends is started again by Ray, empty; the ingresses
write all that they have again, for each has a copy of what it wrote.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from vllm_choreo.api.restored import MadeMessage, SessionRecord

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from vllm_choreo.api.recipes import CallRecipe
    from vllm_choreo.semantics.message import Message
    from vllm_choreo.semantics.session_options import SessionOptions

_NAMESPACE = "vllm-choreo"
# Resource of the node without which there is no cluster either; any amount of it says: there.
_HEAD_NODE = "node:__internal_head__"
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Change:
    """A change of one session.

    Attributes:
        tenant, session: owner and id of the session.
        record: the session as a whole, in place of what was known of it; None: as it is.
        made, freed: a message that was made, and ids of some that were freed.
        is_default: True if the session is the tenant's default from now on.
        is_closed: True if it is closed.
    """

    tenant: str = ""
    session: str = ""
    record: SessionRecord | None = None
    made: MadeMessage | None = None
    freed: tuple[str, ...] = ()
    is_default: bool = False
    is_closed: bool = False


class Records:
    """Records of sessions, by tenant and id."""

    def __init__(self) -> None:
        self.tenants: dict[str, dict[str, SessionRecord]] = {}

    def apply(self, change: Change) -> None:
        """Make a change. One of a session that is not known does nothing."""
        sessions = self.tenants.setdefault(change.tenant, {})
        if change.record is not None:
            sessions[change.session] = change.record
        record = sessions.get(change.session)
        if record is None:
            return
        if change.made is not None:
            record.add(change.made)
        if change.freed:
            record.free(change.freed)
        if change.is_default:
            for other in sessions.values():
                other.is_default = other is record
        if change.is_closed:
            del sessions[change.session]


class JournalActor:
    """The actor."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(8)
        self._records = Records()
        self._writers: dict[str, str] = {}
        self._secret: bytes | None = None

    def secret(self, own: bytes) -> bytes:
        """The secret under which all ingresses name tenants: the first one's."""
        self._secret = self._secret or own
        return self._secret

    def take_over(self, ingress: str, tenant: str) -> list[SessionRecord]:
        """Give a tenant's sessions to an ingress, and take no other one's writes any more."""
        self._writers[tenant] = ingress
        return list(self._records.tenants.get(tenant, {}).values())

    def write(self, ingress: str, changes: Sequence[Change]) -> tuple[str, set[str]]:
        """Make changes.

        Returns:
            The actor's life, which is another one if it was started again; and the tenants that
            are another ingress's.
        """
        lost = set()
        for change in changes:
            if self._writers.setdefault(change.tenant, ingress) == ingress:
                self._records.apply(change)
            else:
                lost.add(change.tenant)
        return self._life, lost


class Places:
    """Actor that knows the ingress of each tenant."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def place(self, key: str, ingresses: Sequence[str]) -> str:
        """The ingress of a tenant: the one that it has, or that with the fewest.

        Args:
            key: digest of the tenant's API key.
            ingresses: ids of those that Serve has.
        """
        if self._places.get(key) not in ingresses:
            count = Counter(self._places.values())
            self._places[key] = min(ingresses, key=lambda name: count[name])
        return self._places[key]


def journal_of(app: str, identity: str) -> ActorHandle:
    """The journal of an application's fleets of one identity, started if it is not there."""
    return _actor(JournalActor, f"journal {app} {identity}")


def places_of(app: str) -> ActorHandle:
    """The places of an application's tenants, started if they are not there."""
    return _actor(Places, f"places {app}")


def _actor(kind: type, name: str) -> ActorHandle:
    return (
        ray.remote(kind)
        .options(
            name=name,
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources={_HEAD_NODE: 0.001},
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
    )


class JournalWriter:
    """Writer of one ingress's sessions: a `SessionJournal`.

    Changes are gathered until `flush`, which the answer that tells of them waits for.

    Attributes:
        on_lost: function that is told of a tenant that is another ingress's now.
    """

    def __init__(self, journal: ActorHandle, ingress: str) -> None:
        self.on_lost: Callable[[str], None] = lambda tenant: None
        self._journal = journal
        self._ingress = ingress
        self._own = Records()
        self._tenants: dict[str, str] = {}  # by session
        self._changes: list[Change] = []
        self._life: str | None = None
        self._lock = asyncio.Lock()

    # -- what happens ----------------------------------------------------------------------------

    def opened(self, session: str, options: SessionOptions) -> None:
        if session not in self._tenants:  # otherwise it was taken over
            self._tenants[session] = options.tenant
            self._change(session, Change(record=SessionRecord.of(session, options)))

    def used_by_default(self, session: str) -> None:
        self._change(session, Change(is_default=True))

    def made(self, session: str, recipe: CallRecipe, message: Message) -> None:
        self._change(session, Change(made=MadeMessage.of(recipe, message)))

    def freed(self, session: str, ids: Sequence[str]) -> None:
        self._change(session, Change(freed=tuple(ids)))

    def closed(self, session: str) -> None:
        self._change(session, Change(is_closed=True))
        self._tenants.pop(session, None)

    def _change(self, session: str, what: Change) -> None:
        tenant = self._tenants.get(session)
        if tenant is not None:
            change = replace(what, tenant=tenant, session=session)
            # The copy grows with the session: what is sent must not.
            own = change if change.record is None else replace(change, record=_copy(change.record))
            self._own.apply(own)
            self._changes.append(change)

    # -- the actor -------------------------------------------------------------------------------

    async def take_over(self, tenant: str) -> list[SessionRecord]:
        """Take over what another ingress had of a tenant."""
        records: list[SessionRecord] = await self._ask("take_over", tenant)
        for record in records:
            self._tenants[record.id] = tenant
            self._own.apply(Change(tenant, record.id, record=record))
        return records

    async def flush(self) -> None:
        """Write all changes. Whoever waits may be cancelled: what was begun is written."""
        if self._changes or self._lock.locked():
            await asyncio.shield(asyncio.ensure_future(self._flush()))

    async def _flush(self) -> None:
        async with self._lock:
            if not self._changes:
                return
            changes, self._changes = self._changes, []
            life, lost = await self._ask("write", changes)
            if self._life not in (None, life):  # it is empty
                life, more = await self._ask("write", self._all())
                lost |= more
            self._life = life
            for tenant in lost:  # before anybody who waits goes on
                self._forget(tenant)
                self.on_lost(tenant)

    def _all(self) -> list[Change]:
        return [
            Change(tenant, record.id, record=record)
            for tenant, records in self._own.tenants.items()
            for record in records.values()
        ]

    def _forget(self, tenant: str) -> None:
        for session in self._own.tenants.pop(tenant, {}):
            self._tenants.pop(session, None)

    async def _ask(self, method: str, *args: object) -> Any:
        """Ask the actor; while it starts again, its answer is waited for."""
        from ray.exceptions import RayActorError

        while True:
            try:
                return await getattr(self._journal, method).remote(self._ingress, *args)
            except RayActorError:
                await asyncio.sleep(_RETRY_SECONDS)


def _copy(record: SessionRecord) -> SessionRecord:
    messages, freed, gone = dict(record.messages), set(record.freed), dict(record.gone)
    return replace(record, messages=messages, freed=freed, gone=gone)

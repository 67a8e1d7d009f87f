# SPDX-License-Identifier: Apache-2.0
"""Roles of a workflow that are played by different models: by adapters, or by servers.

    AdaptersByRole    one session, whose calls use the adapters of their roles
    ServersByRole     a session on each of several servers, whose operators have them exchange what
                      is named (`--choreo-pair`, `--choreo-keep`); here every message has a name

A role with several players has them take turns, call by call.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import cycle
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item, SessionWrapper
from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.errors import UnknownKeptError
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan, message_id, parent_span

# What a server that exchanges messages puts before the names of what it has saved.
_SAVED = "message."
_Player = TypeVar("_Player")


class ServerSession(Facade, Protocol):
    """A session of a server, as clients have it."""

    def delete_saved(self, uri: str) -> None: ...

    def __enter__(self) -> Facade: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class _Turns(Generic[_Player]):
    """Turns of the players of each role."""

    def __init__(self, players: Mapping[str, Sequence[_Player]]) -> None:
        self._next = {role: cycle(those) for role, those in players.items()}

    def of(self, call: Item, otherwise: _Player) -> _Player:
        """Player of a call whose turn it is; `otherwise` if nobody plays its role."""
        turns = self._next.get(call.get("role") or "")
        return otherwise if turns is None else next(turns)


class AdaptersByRole(SessionWrapper):
    """A session whose calls use the adapters of their roles.

    Args:
        c: the session; calls of other roles use its adapter, if it has one.
        players: adapters of each role, as `adapter=` takes them.
    """

    def __init__(self, c: SessionFacade, players: Mapping[str, Sequence[object]]) -> None:
        super().__init__(c)
        self._turns = _Turns(players)

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return self._c.prefill(self._played(calls))

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return self._c.decode(self._played(calls))

    def _played(self, calls: list[Item]) -> list[Item]:
        given = [self._turns.of(call, call.get("adapter")) for call in calls]
        return [
            call if adapter is None else {**call, "adapter": adapter}
            for call, adapter in zip(calls, given, strict=True)
        ]


class ServersByRole(FacadeWrapper):
    """A session on each of several servers, which makes each call where its role is played.

    A message is known by one id here. Its own server knows it by that name, and others find it by
    that name among what servers exchange.

    Args:
        clients: sessions; the first one makes the calls of all other roles. They end with this one.
        players: numbers of the sessions that play each role.
    """

    def __init__(
        self, clients: Sequence[ServerSession], players: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(clients[0])
        self._clients = clients
        self._turns = _Turns(players)
        self._tag = f"run-{secrets.token_hex(8)}"
        self._count = 0
        self._known: dict[str, set[int]] = {}  # sessions that know a message, by its name

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return self._made("prefill", calls)

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return self._made("decode", calls)

    def _made(self, kind: str, calls: list[Item]) -> list[Message]:
        """Make calls, those of each server as a list of its own, all servers at once."""
        parts: dict[int, list[tuple[int, Item]]] = defaultdict(list)
        for number, call in enumerate(calls):
            server = self._turns.of(call, 0)
            parts[server].append((number, self._named(call)))
        with ThreadPoolExecutor(len(parts) or 1) as pool:
            made = pool.map(lambda one: self._on_server(kind, *one), parts.items())
            found = dict(one for of_server in made for one in of_server)
        return [found[number] for number in range(len(calls))]

    def _named(self, call: Item) -> Item:
        """Name a call's message, and what it names as every server knows it."""
        self._count += 1
        named = {**call, "save_as": call.get("save_as") or f"{self._tag}.{self._count}"}
        spans = [parent_span(parent) for parent in call.get("parents") or ()]
        named["parents"] = [span._replace(id=_name(span.id)) for span in spans]
        if call.get("deny"):
            named["deny"] = [_name(message_id(one, "deny")) for one in call["deny"]]
        return named

    def _on_server(
        self, kind: str, server: int, calls: Sequence[tuple[int, Item]]
    ) -> list[tuple[int, Message]]:
        client, items = self._clients[server], [call for _, call in calls]
        made = client.prefill(items) if kind == "prefill" else client.decode(items)
        for call in items:
            for name in (call["save_as"], *(span.id for span in call["parents"])):
                self._known.setdefault(name, set()).add(server)
        numbers = (number for number, _ in calls)
        return [(number, self._told(one)) for number, one in zip(numbers, made, strict=True)]

    def _told(self, message: Message) -> Message:
        """The message under the id that it has here."""
        parents = tuple(ParentSpan(self._id(p.id), p.start, p.stop) for p in message.parents)
        return replace(message, id=self._id(message.id), parents=parents)

    def _id(self, there: str) -> str:
        return f"{self._tag}/{_name(there)}"

    def free(self, *messages: Named) -> None:
        """Free messages on all servers that know them, and what was exchanged of them."""
        of_server: dict[int, list[str]] = defaultdict(list)
        names = [_name(message_id(one, "messages")) for one in messages]
        for name in names:
            for server in self._known.pop(name, ()):
                of_server[server].append(name)
        for server, known in of_server.items():
            self._clients[server].free(*known)
        self._delete_saved(names)

    def _delete_saved(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(UnknownKeptError):  # nobody reads what its server writes
                self._clients[0].delete_saved(f"{_SAVED}{name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for client in self._clients:
                stack.push(client)
            self._delete_saved(list(self._known))


def _name(there: str) -> str:
    """Name of a message, from its id in some session."""
    return there.rpartition("/")[2]


if TYPE_CHECKING:
    _are_facades: tuple[type[Facade], ...] = (AdaptersByRole, ServersByRole)

# SPDX-License-Identifier: Apache-2.0
"""Routes of messages that were made: of one, named in the path, and of several, named in the body.

What is done to a list is done as a whole or refused as a whole. Its answer holds, for each message,
what the route of one message answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, TypeVar

from fastapi import Path
from starlette.requests import Request

from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.errors import ChoreoError, LimitError
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.answers import (
    EvictedAnswer,
    FreedAnswer,
    JsonAnswer,
    ListAnswer,
    PinAnswer,
    ProvenanceAnswer,
    evicted_json,
    freed_json,
    list_json,
    pin_json,
    provenance_json,
)
from vllm_choreo.server.errors import PATH_NAME
from vllm_choreo.server.responses import errors
from vllm_choreo.server.routes import OwnSession, choreo_router, sessions_of
from vllm_choreo.server.schemas import MessagesListBody, PinBody, PinListBody
from vllm_choreo.server.sessions import OpenSession
from vllm_choreo.wire.messages import MessageAnswer, message_json

router = choreo_router()

Name = Annotated[str, Path(description="The name of a message: the part of its id after `/`.")]
_Answer = TypeVar("_Answer")

# What the session, and the engine, call a message that is not there.
_MESSAGE = ("message", "messages", "parents")


@contextmanager
def _in_path(name: str) -> Iterator[None]:
    """Errors about the message of a path, which is called `name` there: they are answered with 404.

    Raises:
        UnknownMessageError, FreedMessageError: there is no such message, or it is freed meanwhile.
        ChoreoError: it is still being generated, or its call failed.
    """
    try:
        yield
    except ChoreoError as error:
        if error.parameter in _MESSAGE:
            error.parameter, error.value = PATH_NAME, name
        raise


def _messages(choreography: AsyncChoreography, names: Sequence[str]) -> list[Message]:
    """Find messages by their names or ids, each once.

    Raises:
        ChoreoError: one of them is not there, or not complete.
    """
    try:
        found = [choreography.message(name) for name in names]
    except ChoreoError as error:
        error.parameter = "messages"
        raise
    return list({message.id: message for message in found}.values())


@dataclass(frozen=True)
class _Operation(Generic[_Answer]):
    """An operation on messages of a session, and what is answered about each."""

    run: Callable[..., Awaitable[None]]
    answer: Callable[[Message], _Answer]

    async def on_list(
        self, session: OpenSession, names: Sequence[str]
    ) -> JsonAnswer[ListAnswer[_Answer]]:
        return JsonAnswer(list_json(await self._on(session, names)))

    async def on_one(self, session: OpenSession, name: str) -> JsonAnswer[_Answer]:
        with _in_path(name):
            (answer,) = await self._on(session, [f"{session.id}/{name}"])
        return JsonAnswer(answer)

    async def _on(self, session: OpenSession, names: Sequence[str]) -> list[_Answer]:
        with session.used() as choreography:
            messages = _messages(choreography, names)
            await self.run(choreography, *messages)
        return list(map(self.answer, messages))


_FREE = _Operation(AsyncChoreography.free, freed_json)
_EVICT = _Operation(AsyncChoreography.evict, evicted_json)
_UNPIN = _Operation(AsyncChoreography.unpin, pin_json)


def _pin(request: Request, given: float | None) -> _Operation[PinAnswer]:
    """Pin messages for some seconds; None: as long as the server allows.

    Raises:
        LimitError: longer than the server allows.
    """
    limit: float = sessions_of(request).config.max_pin_seconds
    seconds = limit if given is None else given
    if seconds > limit:
        raise LimitError(
            f"a message may be pinned for {limit:g} s at a time; pin it again later",
            parameter="max_pin_seconds",
            value=seconds,
        )
    return _Operation(
        partial(AsyncChoreography.pin, ttl=seconds), partial(pin_json, seconds=seconds)
    )


# -- one message ---------------------------------------------------------------------------------


@router.get("/sessions/{session}/messages/{name}", summary="Read a message", responses=errors(404))
async def read_message(session: OwnSession, name: Name) -> JsonAnswer[MessageAnswer]:
    """A message with its text, as it was answered when it was made."""
    with session.used() as choreography, _in_path(name):
        return JsonAnswer(message_json(choreography.message(f"{session.id}/{name}")))


@router.get(
    "/sessions/{session}/messages/{name}/provenance",
    summary="Read a message's provenance",
    responses=errors(404),
)
async def read_provenance(
    request: Request, session: OwnSession, name: Name
) -> JsonAnswer[ProvenanceAnswer]:
    """The ids of all messages that it carries traces of, freed ones among them."""
    with session.used() as choreography, _in_path(name):
        message, work = choreography.message(f"{session.id}/{name}"), sessions_of(request).work
        return await work.run(session.tenant, lambda: JsonAnswer(provenance_json(message)))


@router.delete(
    "/sessions/{session}/messages/{name}", summary="Free a message", responses=errors(404)
)
async def free_message(session: OwnSession, name: Name) -> JsonAnswer[FreedAnswer]:
    """Free a message. Messages that have read it stay as they are."""
    return await _FREE.on_one(session, name)


@router.post(
    "/sessions/{session}/messages/{name}/evict", summary="Evict a message", responses=errors(404)
)
async def evict_message(session: OwnSession, name: Name) -> JsonAnswer[EvictedAnswer]:
    """Drop a message's keys and values; a call that reads it encodes them again."""
    return await _EVICT.on_one(session, name)


@router.post(
    "/sessions/{session}/messages/{name}/pin",
    summary="Pin a message",
    responses=errors(404, 413, 429),
)
async def pin_message(
    request: Request, session: OwnSession, name: Name, body: PinBody | None = None
) -> JsonAnswer[PinAnswer]:
    """Evict a message after all others, for some time. Pinning it again sets the time anew."""
    return await _pin(request, body and body.ttl_seconds).on_one(session, name)


@router.delete(
    "/sessions/{session}/messages/{name}/pin", summary="Unpin a message", responses=errors(404)
)
async def unpin_message(session: OwnSession, name: Name) -> JsonAnswer[PinAnswer]:
    """Take a pin back; that of a message that is not pinned, too."""
    return await _UNPIN.on_one(session, name)


# -- several messages ----------------------------------------------------------------------------


@router.post(
    "/sessions/{session}/messages/free", summary="Free messages", responses=errors(404, 413)
)
async def free_messages(
    session: OwnSession, body: MessagesListBody
) -> JsonAnswer[ListAnswer[FreedAnswer]]:
    """Free messages. Those that have read them stay as they are."""
    return await _FREE.on_list(session, body.messages)


@router.post(
    "/sessions/{session}/messages/evict", summary="Evict messages", responses=errors(404, 413)
)
async def evict_messages(
    session: OwnSession, body: MessagesListBody
) -> JsonAnswer[ListAnswer[EvictedAnswer]]:
    """Drop the keys and values of messages; a call that reads one encodes it again."""
    return await _EVICT.on_list(session, body.messages)


@router.post(
    "/sessions/{session}/messages/pin", summary="Pin messages", responses=errors(404, 413, 429)
)
async def pin_messages(
    request: Request, session: OwnSession, body: PinListBody
) -> JsonAnswer[ListAnswer[PinAnswer]]:
    """Evict messages after all others, for some time."""
    return await _pin(request, body.ttl_seconds).on_list(session, body.messages)


@router.post(
    "/sessions/{session}/messages/unpin", summary="Unpin messages", responses=errors(404, 413)
)
async def unpin_messages(
    session: OwnSession, body: MessagesListBody
) -> JsonAnswer[ListAnswer[PinAnswer]]:
    """Take pins back; those of messages that are not pinned, too."""
    return await _UNPIN.on_list(session, body.messages)

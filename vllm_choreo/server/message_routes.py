# SPDX-License-Identifier: Apache-2.0
"""Routes of messages that were made: of several at once, and of one's provenance.

A list is done as a whole or refused as a whole. Each answer holds, for each message, what the route
of one message answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message
from vllm_choreo.server import documents
from vllm_choreo.server.answers import evicted_json, freed_json, list_json, pin_json
from vllm_choreo.server.routes import (
    Name,
    OwnSession,
    choreo_router,
    named_message,
    pin_seconds,
    sessions_of,
)
from vllm_choreo.server.schemas import MessagesListBody, PinListBody

router = choreo_router()


def _messages(choreography: AsyncChoreography, names: Sequence[str]) -> list[Message]:
    """The messages of a body, each once.

    Raises:
        ChoreoError: one of them is not there, or not complete.
    """
    try:
        found = [choreography.message(name) for name in names]
    except ChoreoError as error:
        error.parameter = "messages"
        raise
    return list({message.id: message for message in found}.values())


@router.post(
    "/sessions/{session}/messages/free",
    summary="Free messages",
    response_model=documents.FreedListAnswer,
    responses=documents.errors(404, 413),
)
async def free_messages(session: OwnSession, body: MessagesListBody) -> Response:
    """Free messages. Those that have read them stay as they are."""
    with session.used() as choreography:
        messages = _messages(choreography, body.messages)
        await choreography.free(*messages)
    return JSONResponse(list_json(map(freed_json, messages)))


@router.post(
    "/sessions/{session}/messages/evict",
    summary="Evict messages",
    response_model=documents.EvictedListAnswer,
    responses=documents.errors(404, 413),
)
async def evict_messages(session: OwnSession, body: MessagesListBody) -> Response:
    """Drop the keys and values of messages; a call that reads one encodes it again."""
    with session.used() as choreography:
        messages = _messages(choreography, body.messages)
        await choreography.evict(*messages)
    return JSONResponse(list_json(map(evicted_json, messages)))


@router.post(
    "/sessions/{session}/messages/pin",
    summary="Pin messages",
    response_model=documents.PinListAnswer,
    responses=documents.errors(404, 413, 429),
)
async def pin_messages(request: Request, session: OwnSession, body: PinListBody) -> Response:
    """Evict messages after all others, for some time."""
    seconds = pin_seconds(request, body.ttl_seconds)
    with session.used() as choreography:
        messages = _messages(choreography, body.messages)
        await choreography.pin(*messages, ttl=seconds)
    return JSONResponse(list_json(pin_json(message, seconds) for message in messages))


@router.post(
    "/sessions/{session}/messages/unpin",
    summary="Unpin messages",
    response_model=documents.PinListAnswer,
    responses=documents.errors(404, 413),
)
async def unpin_messages(session: OwnSession, body: MessagesListBody) -> Response:
    """Take pins back; those of messages that are not pinned, too."""
    with session.used() as choreography:
        messages = _messages(choreography, body.messages)
        await choreography.unpin(*messages)
    return JSONResponse(list_json(pin_json(message, None) for message in messages))


@router.get(
    "/sessions/{session}/messages/{name}/provenance",
    summary="Read a message's provenance",
    response_model=documents.ProvenanceAnswer,
    responses=documents.errors(404),
)
async def read_provenance(request: Request, session: OwnSession, name: Name) -> Response:
    """The ids of all messages that it carries traces of, freed ones among them."""
    with named_message(session, name) as (message, _):
        answer: Response = await sessions_of(request).work.run(
            session.tenant, _provenance_answer, message
        )
    return answer


def _provenance_answer(message: Message) -> Response:
    sources = sorted(message.provenance)
    return JSONResponse({"id": message.id, "object": "choreo.provenance", "provenance": sources})

# SPDX-License-Identifier: Apache-2.0
"""The HTTP API, under /v1/choreo. Every route of a session ends with 404 if it is not the tenant's.

Bodies and answers are described in `schemas.py` and `documents.py`, errors in `errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Path, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import HTMLResponse, JSONResponse, Response

from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.errors import ChoreoError, LimitError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import RepairGiven, SessionOptions
from vllm_choreo.server import documents
from vllm_choreo.server.answers import evicted_json, freed_json, list_json, pin_json, results_json
from vllm_choreo.server.body import ChoreoRoute
from vllm_choreo.server.errors import PATH_NAME, error_response
from vllm_choreo.server.page import session_page
from vllm_choreo.server.running import Run, unless_gone
from vllm_choreo.server.schemas import CallsBody, MessagesBody, PinBody, SessionBody
from vllm_choreo.server.sessions import OpenSession, Sessions
from vllm_choreo.server.streaming import EventStream
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.wire.messages import message_json, short_message_json

_CLIENT_GONE = 499  # nobody reads it; it is seen in vLLM's metrics of requests

_key = HTTPBearer(auto_error=False, description="An API key of the server, if it has any.")


def choreo_router() -> APIRouter:
    """A router without routes yet: what all of ours have in common."""
    return APIRouter(
        prefix="/v1/choreo",
        tags=["choreography"],
        route_class=ChoreoRoute,
        dependencies=[Security(_key)],
        responses=documents.errors(400, 401, 503) | documents.COMMON,
    )


router = choreo_router()


def sessions_of(request: Request) -> Sessions:
    """The sessions of the server."""
    sessions: Sessions = request.app.state.choreo
    return sessions


def _session(
    request: Request, session: Annotated[str, Path(description="The id of a session.")]
) -> OpenSession:
    return sessions_of(request).session(tenant_of(request), session)


async def _few_calls(request: Request) -> None:
    """Refuse a list of calls that is too long, before time is spent on checking each of them.

    Raises:
        LimitError: it is.
    """
    limit = sessions_of(request).config.max_calls_per_request
    body = await request.json() if await request.body() else None
    calls = body.get("calls") if isinstance(body, dict) else None
    if isinstance(calls, list) and len(calls) > limit:
        raise LimitError(
            f"a request has up to {limit} calls: send them in parts, or raise the server's setting "
            "choreo.server.max_calls_per_request",
            parameter="max_calls_per_request",
            value=len(calls),
        )


OwnSession = Annotated[OpenSession, Depends(_session)]
Name = Annotated[str, Path(description="The name of a message: the part of its id after `/`.")]


# -- sessions ------------------------------------------------------------------------------------


@router.post(
    "/sessions",
    summary="Open a session",
    response_model=documents.SessionAnswer,
    responses=documents.errors(413, 429),
)
async def open_session(request: Request, body: SessionBody | None = None) -> Response:
    """Open a session: messages live in it until they are freed or it is closed."""
    sessions, body = sessions_of(request), body or SessionBody()
    adapter = await request.app.state.choreo_reader.adapters.resolve(body.adapter)
    tenant = tenant_of(request)
    options = SessionOptions(
        mode=body.mode,
        ttl_seconds=body.ttl_seconds,
        adapter=adapter,
        placement=body.placement,
        repair=cast("RepairGiven", body.repair),  # a list is refused: it is one call's
    )
    opened = sessions.open(tenant, options)
    return JSONResponse(await sessions.describe(opened))


@router.get(
    "/sessions/{session}",
    summary="Read a session",
    response_model=documents.SessionAnswer,
    responses=documents.errors(404),
)
async def read_session(request: Request, session: OwnSession) -> Response:
    """Contents of a session, and when it expires."""
    with session.used():
        return JSONResponse(await sessions_of(request).describe(session))


@router.delete(
    "/sessions/{session}",
    summary="Close a session",
    response_model=documents.ClosedAnswer,
    responses=documents.errors(404),
)
async def close_session(request: Request, session: OwnSession) -> Response:
    """End the calls that are running, and free all messages."""
    await sessions_of(request).close(session)
    return JSONResponse({"id": session.id, "object": "choreo.session.deleted", "deleted": True})


@router.get(
    "/sessions/{session}/page",
    summary="Show a session",
    # Not HTMLResponse: errors would be described as HTML, too.
    response_class=Response,
    responses=documents.PAGE | documents.errors(404),
)
async def show_session(request: Request, session: OwnSession) -> Response:
    """The messages of a session as a page: who read whom, and what it cost.

    Off unless the server's setting `page` is true.
    """
    sessions = sessions_of(request)
    if not sessions.config.page:
        off = ChoreoError("the page is off: set choreo.server.page", parameter="page", value=False)
        return error_response(off, 404)
    with session.used() as choreography:
        messages = choreography.messages()
        content = await sessions.work.run(
            session.tenant,
            partial(session_page, session.id, choreography.mode, sessions.model, messages),
        )
    return HTMLResponse(content, headers={"Cache-Control": "no-store"})


# -- calls ---------------------------------------------------------------------------------------


@router.post(
    "/sessions/{session}/messages",
    summary="Make messages",
    dependencies=[Depends(_few_calls)],
    responses=documents.RESULTS | documents.errors(404, 409, 413, 429),
)
async def make_messages(request: Request, session: OwnSession, body: MessagesBody) -> Response:
    """Run one call, or a list of calls.

    The calls of a list run at once, each as soon as the messages that it reads are complete; later
    ones may name earlier ones as parents, by their `save_as`. If one of them is illegal, none is
    run. A client that goes away ends its calls.
    """
    run, is_list = Run(sessions_of(request), session), isinstance(body, CallsBody)
    try:
        bodies = body.calls if is_list else [body]
        reader = request.app.state.choreo_reader
        calls = await reader.read(bodies, session.tenant, session.adapter)
        await run.submit(calls)
    except BaseException:
        run.leave(is_answered=True)
        raise
    if body.stream:
        return EventStream(run)
    results = await unless_gone(request, run)
    if results is None:
        return Response(status_code=_CLIENT_GONE)
    if is_list:
        work = sessions_of(request).work
        answer: Response = await work.run(
            session.tenant, lambda: JSONResponse(results_json(results))
        )
        return answer
    (result,) = results
    if isinstance(result, ChoreoError):
        return error_response(result)
    return JSONResponse(message_json(result))


@router.get(
    "/sessions/{session}/messages",
    summary="List messages",
    response_model=documents.MessageListAnswer,
    responses=documents.errors(404),
)
async def list_messages(request: Request, session: OwnSession) -> Response:
    """All messages that are complete and not freed."""

    def answer(messages: list[Message]) -> Response:
        return JSONResponse(list_json(map(short_message_json, messages)))

    with session.used() as choreography:
        work = sessions_of(request).work
        return await work.run(session.tenant, answer, choreography.messages())


# -- one message ---------------------------------------------------------------------------------


# What the session, and the engine, call a message that is not there.
_MESSAGE = ("message", "messages", "parents")


@contextmanager
def named_message(session: OpenSession, name: str) -> Iterator[tuple[Message, AsyncChoreography]]:
    """The message of a path, and the session, which is used meanwhile.

    Raises:
        UnknownMessageError, FreedMessageError: there is none, or it is freed meanwhile; they are
            answered with 404.
        ChoreoError: it is still being generated, or its call failed.
    """
    with session.used() as choreography:
        try:
            yield choreography.message(f"{session.id}/{name}"), choreography
        except ChoreoError as error:
            if error.parameter in _MESSAGE:
                error.parameter, error.value = PATH_NAME, name
            raise


@router.get(
    "/sessions/{session}/messages/{name}",
    summary="Read a message",
    response_model=documents.MessageAnswer,
    responses=documents.errors(404),
)
async def read_message(session: OwnSession, name: Name) -> Response:
    """A message with its text, as it was answered when it was made."""
    with named_message(session, name) as (message, _):
        return JSONResponse(message_json(message))


@router.delete(
    "/sessions/{session}/messages/{name}",
    summary="Free a message",
    response_model=documents.FreedAnswer,
    responses=documents.errors(404),
)
async def free_message(session: OwnSession, name: Name) -> Response:
    """Free a message. Messages that have read it stay as they are."""
    with named_message(session, name) as (message, choreography):
        await choreography.free(message)
    return JSONResponse(freed_json(message))


@router.post(
    "/sessions/{session}/messages/{name}/evict",
    summary="Evict a message",
    response_model=documents.EvictedAnswer,
    responses=documents.errors(404),
)
async def evict_message(session: OwnSession, name: Name) -> Response:
    """Drop a message's keys and values; a call that reads it encodes them again."""
    with named_message(session, name) as (message, choreography):
        await choreography.evict(message)
    return JSONResponse(evicted_json(message))


@router.post(
    "/sessions/{session}/messages/{name}/pin",
    summary="Pin a message",
    response_model=documents.PinAnswer,
    responses=documents.errors(404, 413, 429),
)
async def pin_message(
    request: Request, session: OwnSession, name: Name, body: PinBody | None = None
) -> Response:
    """Evict a message after all others, for some time. Pinning it again sets the time anew."""
    seconds = pin_seconds(request, body.ttl_seconds if body else None)
    with named_message(session, name) as (message, choreography):
        await choreography.pin(message, ttl=seconds)
    return JSONResponse(pin_json(message, seconds))


@router.delete(
    "/sessions/{session}/messages/{name}/pin",
    summary="Unpin a message",
    response_model=documents.PinAnswer,
    responses=documents.errors(404),
)
async def unpin_message(session: OwnSession, name: Name) -> Response:
    """Take a pin back; that of a message that is not pinned, too."""
    with named_message(session, name) as (message, choreography):
        await choreography.unpin(message)
    return JSONResponse(pin_json(message, None))


def pin_seconds(request: Request, given: float | None) -> float:
    """Seconds for which messages are pinned.

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
    return seconds

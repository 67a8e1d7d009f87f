# SPDX-License-Identifier: Apache-2.0
"""The HTTP API, under /v1/choreo. Every route of a session ends with 404 if it is not the tenant's.

Bodies are described in `schemas.py`, answers in `answers.py`, errors in `errors.py`; routes of
messages that were made are in `message_routes.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Path, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import HTMLResponse, Response

from vllm_choreo.api.fleet import Fleet
from vllm_choreo.errors import ChoreoError, LimitError, UnsupportedOptionError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import RepairGiven, SessionOptions
from vllm_choreo.server import responses
from vllm_choreo.server.answers import (
    BlocksAnswer,
    ClosedAnswer,
    FleetAnswer,
    JsonAnswer,
    ListAnswer,
    SessionAnswer,
    blocks_json,
    fleet_json,
    list_json,
    results_json,
)
from vllm_choreo.server.body import CLIENT_GONE, ChoreoRoute
from vllm_choreo.server.errors import error_response
from vllm_choreo.server.page import session_page
from vllm_choreo.server.running import Run, unless_gone
from vllm_choreo.server.schemas import CallsBody, MessagesBody, SessionBody
from vllm_choreo.server.sessions import OpenSession, Sessions
from vllm_choreo.server.streaming import EventStream
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.wire.messages import ShortMessageAnswer, message_json, short_message_json

_key = HTTPBearer(auto_error=False, description="An API key of the server, if it has any.")


def choreo_router() -> APIRouter:
    """A router without routes yet: what all of ours have in common."""
    return APIRouter(
        prefix="/v1/choreo",
        tags=["choreography"],
        route_class=ChoreoRoute,
        dependencies=[Security(_key)],
        responses=responses.errors(400, 401, 503) | responses.COMMON,
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


# -- engines -------------------------------------------------------------------------------------


@router.get("/fleet", summary="Look at the engines")
async def show_fleet(request: Request) -> JsonAnswer[FleetAnswer]:
    """Show what each of several engines holds and has to do, and what was moved between them."""
    fleet: Fleet | None = request.app.state.choreo_fleet
    if fleet is None:
        raise UnsupportedOptionError(
            "this server has one engine, of which /metrics tells: --data-parallel-size starts more",
            parameter="data_parallel_size",
            value=1,
        )
    return JsonAnswer(fleet_json(fleet))


# -- sessions ------------------------------------------------------------------------------------


@router.post("/sessions", summary="Open a session", responses=responses.errors(413, 429))
async def open_session(
    request: Request, body: SessionBody | None = None
) -> JsonAnswer[SessionAnswer]:
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
    return JsonAnswer(await sessions.describe(opened))


@router.get("/sessions/{session}", summary="Read a session", responses=responses.errors(404))
async def read_session(request: Request, session: OwnSession) -> JsonAnswer[SessionAnswer]:
    """Contents of a session, and when it expires."""
    with session.used():
        return JsonAnswer(await sessions_of(request).describe(session))


@router.delete("/sessions/{session}", summary="Close a session", responses=responses.errors(404))
async def close_session(request: Request, session: OwnSession) -> JsonAnswer[ClosedAnswer]:
    """End the calls that are running, and free all messages."""
    await sessions_of(request).close(session)
    return JsonAnswer({"id": session.id, "object": "choreo.session.deleted", "deleted": True})


@router.get(
    "/sessions/{session}/page",
    summary="Show a session",
    # Not HTMLResponse: errors would be described as HTML, too.
    response_class=Response,
    responses=responses.PAGE | responses.errors(404),
)
async def show_session(request: Request, session: OwnSession) -> Response:
    """The messages of a session as a page: who read whom, and what it cost.

    Off unless the server's setting `page` is true.
    """
    sessions = sessions_of(request)
    if not sessions.config.page:
        return error_response(page_off_error(), 404)
    with session.used() as choreography:
        messages = choreography.messages()
        engines = {message.id: choreography.engine_of(message) for message in messages}
        content = await sessions.work.run(
            session.tenant,
            partial(session_page, session.id, choreography.mode, sessions.model, messages, engines),
        )
    return HTMLResponse(content, headers={"Cache-Control": "no-store"})


@router.get(
    "/sessions/{session}/blocks",
    summary="Read a session's KV blocks",
    response_model=BlocksAnswer,
    responses=responses.errors(404),
)
async def read_blocks(request: Request, session: OwnSession) -> Response:
    """Blocks of the KV cache in which the messages of a session lie, and who shares them.

    Off unless the server's setting `page` is true.
    """
    if not sessions_of(request).config.page:
        return error_response(page_off_error(), 404)
    with session.used() as choreography:
        return JsonAnswer(blocks_json(session.id, await choreography.stats()))


def page_off_error() -> ChoreoError:
    """Error of whoever asks for what is served with the page alone."""
    return ChoreoError(
        "the page is off: start the server with --choreo-page, or set choreo.server.page",
        parameter="page",
        value=False,
    )


# -- calls ---------------------------------------------------------------------------------------


@router.post(
    "/sessions/{session}/messages",
    summary="Make messages",
    dependencies=[Depends(_few_calls)],
    responses=responses.RESULTS | responses.errors(404, 409, 413, 429),
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
        return Response(status_code=CLIENT_GONE)
    if is_list:
        work = sessions_of(request).work
        return await work.run(session.tenant, lambda: JsonAnswer(results_json(results)))
    (result,) = results
    if isinstance(result, ChoreoError):
        return error_response(result)
    return JsonAnswer(message_json(result))


@router.get(
    "/sessions/{session}/messages", summary="List messages", responses=responses.errors(404)
)
async def list_messages(
    request: Request, session: OwnSession
) -> JsonAnswer[ListAnswer[ShortMessageAnswer]]:
    """All messages that are complete and not freed."""

    def answer(messages: list[Message]) -> JsonAnswer[ListAnswer[ShortMessageAnswer]]:
        return JsonAnswer(list_json(map(short_message_json, messages)))

    with session.used() as choreography:
        work = sessions_of(request).work
        return await work.run(session.tenant, answer, choreography.messages())

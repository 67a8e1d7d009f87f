# SPDX-License-Identifier: Apache-2.0
"""Routes of schemas and prompts. A schema belongs to a tenant, or to the operator: then to all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, cast

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from vllm_choreo.errors import ChoreoError
from vllm_choreo.pml.language.markup import parse_prompt
from vllm_choreo.pml.language.outline import outline
from vllm_choreo.pml.language.placing import PromptUsage
from vllm_choreo.pml.language.printer import to_markup
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.server.bodies import (
    Context,
    DeletedSchemaAnswer,
    ModuleAnswer,
    PrefetchBody,
    PrefetchedAnswer,
    PromptAnswerBody,
    PromptBody,
    SchemaAnswer,
    SchemaBody,
    ShortSchemaAnswer,
)
from vllm_choreo.pml.server.served_schemas import ServedSchema, ServedSchemas
from vllm_choreo.pml.server.session_prompts import PromptCalls
from vllm_choreo.semantics.message import Message
from vllm_choreo.server import responses
from vllm_choreo.server.answers import JsonAnswer, ListAnswer, list_json
from vllm_choreo.server.call_reader import sampling_of
from vllm_choreo.server.errors import error_response
from vllm_choreo.server.routes import choreo_router, sessions_of
from vllm_choreo.server.running import Run, unless_gone
from vllm_choreo.server.sessions import OpenSession
from vllm_choreo.server.streaming import EventStream
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.wire.messages import message_json

_CLIENT_GONE = 499

router = choreo_router()

SchemaPath = Annotated[str, Path(description="The name of a schema.")]


def _schemas(request: Request) -> ServedSchemas:
    schemas: ServedSchemas = request.app.state.choreo_schemas
    return schemas


def _session(request: Request, named: str | None) -> OpenSession:
    sessions = sessions_of(request)
    tenant = tenant_of(request)
    return sessions.default_session(tenant) if named is None else sessions.session(tenant, named)


# -- schemas -------------------------------------------------------------------------------------


@router.post("/schemas", summary="Register a schema", responses=responses.errors(409, 413, 429))
async def register_schema(request: Request, body: SchemaBody) -> JsonAnswer[SchemaAnswer]:
    """Register a schema of prompts. The same one again is answered as it is."""
    schemas = _schemas(request)
    served = await schemas.register(tenant_of(request), body.markup, body.context)
    if body.encode:
        session = _session(request, None)
        with session.used():
            await schemas.of_session(session).encode(served.name)
    return await _schema_answer(request, served)


@router.get("/schemas", summary="List schemas")
async def list_schemas(request: Request) -> JsonAnswer[ListAnswer[ShortSchemaAnswer]]:
    """The schemas that prompts can name: the operator's, then your own."""
    found = _schemas(request).listed(tenant_of(request))
    return JsonAnswer(list_json(map(_short_json, found)))


@router.get("/schemas/{name}", summary="Read a schema", responses=responses.errors(404))
async def read_schema(request: Request, name: SchemaPath) -> JsonAnswer[SchemaAnswer]:
    """A schema with its modules, as markup, and as a tree."""
    return await _schema_answer(request, _schemas(request).named(tenant_of(request), name))


@router.delete("/schemas/{name}", summary="Delete a schema", responses=responses.errors(404))
async def delete_schema(request: Request, name: SchemaPath) -> JsonAnswer[DeletedSchemaAnswer]:
    """Forget a schema of yours, and free its messages in all of your sessions."""
    await _schemas(request).delete(tenant_of(request), name)
    return JsonAnswer({"id": name, "object": "choreo.schema.deleted", "deleted": True})


@router.post(
    "/schemas/{name}/prefetch",
    summary="Prefetch a union",
    responses=responses.errors(404, 409, 413, 429),
)
async def prefetch_union(
    request: Request, name: SchemaPath, body: PrefetchBody
) -> JsonAnswer[PrefetchedAnswer]:
    """Bring all members of the unions around a module into the KV cache.

    Members that were never encoded are encoded, and those that were evicted come back.
    """
    schemas, session = _schemas(request), _session(request, body.session)
    schemas.named(session.tenant, name)
    with session.used():
        encoded = await schemas.of_session(session).prefetch(name, body.module)
    return JsonAnswer(
        {
            "id": name,
            "object": "choreo.schema.prefetched",
            "module": body.module,
            "encoded": encoded,
        }
    )


def _short_json(served: ServedSchema) -> ShortSchemaAnswer:
    layout = served.registered.layout
    return {
        "id": served.name,
        "object": "choreo.schema",
        "created": int(served.created),
        "owner": "operator" if served.is_operators else "tenant",
        "context": cast("Context", served.registered.context),
        "num_tokens": layout.num_tokens,
        "num_positions": layout.num_positions,
        "num_modules": layout.num_modules,
    }


async def _schema_answer(request: Request, served: ServedSchema) -> JsonAnswer[SchemaAnswer]:
    sessions, tenant = sessions_of(request), tenant_of(request)
    session = sessions.opened_default(tenant)
    encoded = _schemas(request).of_session(session).encoded if session else frozenset()
    return await sessions.work.run(tenant, lambda: JsonAnswer(_schema_json(served, encoded)))


def _schema_json(served: ServedSchema, encoded: Collection[EncodingKey]) -> SchemaAnswer:
    layout = served.registered.layout
    modules: list[ModuleAnswer] = [
        {
            "path": module.title,
            "start": module.start,
            "stop": module.stop,
            "num_tokens": sum(len(segment.token_ids) for segment in module.segments),
            "cached": module.is_cached,
            "params": [{"name": name, "length": n} for name, n in module.params.items()],
        }
        for module in layout.root.walk()
        if module.path
    ]
    return {
        **_short_json(served),
        "modules": modules,
        "markup": to_markup(layout.schema),
        "outline": outline(layout, encoded),
    }


# -- prompts -------------------------------------------------------------------------------------

_ANSWER: dict[int | str, dict[str, Any]] = {
    200: responses.RESULTS[200] | {"model": PromptAnswerBody}
}


@router.post(
    "/prompts", summary="Run a prompt", responses=_ANSWER | responses.errors(404, 409, 413, 429)
)
async def run_prompt(request: Request, body: PromptBody) -> Response:
    """Generate after a prompt of a registered schema; modules are read as they are encoded.

    A client that goes away ends the call. With `stream`, the events are those of one call.
    """
    session = _session(request, body.session)
    run = Run(sessions_of(request), session)
    prompts = _schemas(request).of_session(session)
    try:
        calls = await prompts.calls(
            partial(parse_prompt, body.prompt),
            await _options(request, session, body),
            _limit(run),
        )
        last = calls.last(sampling_params=sampling_of(body.sampling_params))
        await run.submit([*calls.pieces, last])
    except BaseException:
        run.leave(is_answered=True)
        raise
    pieces = run.pending[:-1]
    if pieces:
        run.sessions.in_background(prompts.free_pieces(pieces))
    if body.stream:
        return EventStream(run, lambda index, event: _told(calls, index, event))
    results = await unless_gone(request, run)
    if results is None:
        return Response(status_code=_CLIENT_GONE)
    failed = next((result for result in results if isinstance(result, ChoreoError)), None)
    if failed is not None:
        return error_response(failed)
    assert isinstance(results[-1], Message)
    return JsonAnswer(with_usage(message_json(results[-1]), calls.asked.plan.usage))


async def _options(request: Request, session: OpenSession, body: PromptBody) -> dict[str, Any]:
    reader = request.app.state.choreo_reader
    return {
        "layout": body.layout,
        "messages": body.messages,
        "mode": body.mode,
        "repair": body.repair,
        "adapter": await reader.adapter_of(body.adapter, session.adapter),
        "deny": body.deny,
        "save_as": body.save_as,
    }


def _limit(run: Run) -> int:
    return run.sessions.config.max_calls_per_request


def _told(calls: PromptCalls, index: int, event: Mapping[str, Any]) -> Mapping[str, object] | None:
    """An event of the last call, as if there were no other; None: of another call."""
    if index < len(calls.pieces):
        return None
    event = {**event, "index": 0}
    return with_usage(event, calls.asked.plan.usage) if "usage" in event else event


def with_usage(answer: Mapping[str, Any], usage: PromptUsage) -> dict[str, Any]:
    """A message object that says where the prompt's tokens came from."""
    return {**answer, "usage": {**answer["usage"], **asdict(usage)}}

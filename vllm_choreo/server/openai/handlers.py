# SPDX-License-Identifier: Apache-2.0
"""vLLM's handlers of /v1/completions and /v1/chat/completions, which also choreograph."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.errors import ChoreoError
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.openai.answering import (
    Answer,
    event_with_numbers,
    in_terms_of_xargs,
    with_numbers,
)
from vllm_choreo.server.openai.auto_chats import AutoChats
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.openai.pictures import with_named_pictures
from vllm_choreo.server.openai.reading import check_form, read_arguments, read_sent
from vllm_choreo.server.running import Run
from vllm_choreo.server.sessions import OpenSession, Sessions
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.server.wings import Body, PromptRequest, begin_prompt

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.engine.async_llm import AsyncLLM

# A method of vLLM's handlers, which takes the handler, the body and the request.
Create = Callable[..., Awaitable[Any]]


def init_state(state: State, llm: AsyncLLM, auto: AutoChats) -> None:
    """Let the handlers of vLLM's routes choreograph.

    Args:
        state: state of the app, with `choreo` and `choreo_reader`.
        llm: an engine client that takes choreographed requests.
        auto: chats that name no messages.
    """
    for name, handler in (
        ("openai_serving_completion", ChoreoServingCompletion),
        ("openai_serving_chat", ChoreoServingChat),
    ):
        serving = getattr(state, name)
        # vLLM names the classes of its handlers; the subclasses only add to them.
        serving.__class__ = handler
        serving.choreo_sessions, serving.choreo_llm = state.choreo, llm
        serving.choreo_state, serving.choreo_auto = state, auto


class ChoreoServing(Protocol):
    """Handler of vLLM's that `init_state` lets choreograph."""

    choreo_llm: AsyncLLM
    choreo_sessions: Sessions
    choreo_state: State


class ChoreoServingCompletion(OpenAIServingCompletion):
    """vLLM's handler of /v1/completions."""

    choreo_auto: AutoChats

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        create = OpenAIServingCompletion.create_completion
        try:
            client = await self.choreo_auto.client_of_parts(self, request, raw_request)
            if client is not None:
                return await run_call(self, create, request, client, raw_request)
        except (ChoreoError, EngineDeadError) as error:
            raise in_terms_of_xargs(error) from None
        if not choreo_keys(request.vllm_xargs):
            return await super().create_completion(request, raw_request)
        if "add_special_tokens" not in request.model_fields_set:
            # The prompt is the next piece of a text, not its beginning.
            request.add_special_tokens = False
        return await _answer(self, create, request, raw_request)


class ChoreoServingChat(OpenAIServingChat):
    """vLLM's handler of /v1/chat/completions."""

    choreo_auto: AutoChats

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        create = OpenAIServingChat.create_chat_completion
        try:
            client = await self.choreo_auto.client(self, request, raw_request)
            if client is not None:
                return await run_call(self, create, request, client, raw_request)
        except (ChoreoError, EngineDeadError) as error:
            raise in_terms_of_xargs(error) from None
        if not choreo_keys(request.vllm_xargs):
            return await super().create_chat_completion(request, raw_request)
        return await _answer(self, create, request, raw_request)


async def _answer(
    serving: ChoreoServing, create: Create, body: Body, raw_request: Request | None
) -> Answer:
    """Read a choreographed request, and let vLLM's handler answer it.

    Raises:
        ChoreoError: the request is refused, or failed in the engine before anything was answered.
    """
    assert raw_request is not None, "requests of the routes come with it"
    try:
        check_form(body)
        sessions = serving.choreo_sessions
        sent = await read_sent(raw_request, sessions.work, sessions.config.max_request_bytes)
        arguments, session_id = read_arguments(sent["vllm_xargs"])
        session = _session(sessions, tenant_of(raw_request), session_id)
        client = await _client(serving, body, session, arguments)
        return await run_call(serving, create, body, client, raw_request)
    except (ChoreoError, EngineDeadError) as error:
        raise in_terms_of_xargs(error) from None


async def _client(
    serving: ChoreoServing, body: Body, session: OpenSession, arguments: dict[str, Any]
) -> CallClient:
    """The engine client of a request; where its text is a wing's prompt, that has begun.

    Raises:
        ChoreoError: the prompt is illegal.
    """
    run = Run(serving.choreo_sessions, session)
    try:
        # `model` names the adapter of a whole workflow, of which this prompt is a part.
        adapter = await serving.choreo_state.choreo_reader.adapter_of(None, body.model)
        request = PromptRequest(serving.choreo_state, session, run, body, arguments, adapter)
        begun = await begin_prompt(request)
    except BaseException:
        run.leave(is_answered=True)
        raise
    if begun is None:
        return CallClient(serving.choreo_llm, run, arguments)
    client = CallClient(serving.choreo_llm, run, arguments, begun.header, begun.usage)
    if begun.clean_up is not None:
        run.sessions.in_background(begun.clean_up(client.settled))
    return client


def _session(sessions: Sessions, tenant: str, session_id: str | None) -> OpenSession:
    if session_id is None:
        return sessions.default_session(tenant)
    return sessions.session(tenant, session_id)


async def run_call(
    serving: OpenAIServingChat | OpenAIServingCompletion,
    create: Create,
    body: Body,
    client: CallClient,
    raw_request: Request | None = None,
) -> Answer:
    """Let vLLM's handler answer a request that makes one message.

    Args:
        serving: the handler.
        create: its method; takes `serving`, `body` and `raw_request`.
        client: runs the call; it is left at the end.

    Raises:
        ChoreoError: as `_answer`; parameters have the names that they have in Python.
    """
    # Handlers keep nothing from request to request; this one has an engine client of its own.
    serving = copy.copy(serving)
    serving.engine_client = client
    online = serving.online_renderer
    if online.model_config.is_multimodal_model:
        serving.online_renderer = with_named_pictures(online, client)
    if body.stream:
        return await _begun(client, lambda: create(serving, body, raw_request))
    try:
        answer = await create(serving, body, raw_request)
        client.is_told = client.message is not None
    finally:
        client.leave()
    return with_numbers(answer, client)


async def _begun(client: CallClient, create: Callable[[], Awaitable[Answer]]) -> Answer:
    """The stream of an answer, once the engine has the request; a refusal has a status."""
    events = _events(client, create)
    answer = await anext(events)
    if isinstance(answer, ErrorResponse):
        await events.aclose()
        return answer
    return events


async def _events(
    client: CallClient, create: Callable[[], Awaitable[Any]]
) -> AsyncGenerator[Any, None]:
    """Yield vLLM's answer, which is a stream or an error; then the events of the stream.

    Whoever has taken the answer need not take any event: what is left of an abandoned generator is
    tidied up when it is collected.
    """
    try:
        answer = await create()
        is_stream = await client.submit()
        yield answer
        if is_stream:
            async for event in answer:
                yield event_with_numbers(event, client)
    finally:
        client.leave()

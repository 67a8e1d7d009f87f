# SPDX-License-Identifier: Apache-2.0
"""Choreography on vLLM's own routes /v1/completions and /v1/chat/completions.

A request is choreographed if its `vllm_xargs` have a key that begins with `choreo_`. Then vLLM
does all that it does for any other request, from the chat template to tool calls and streams, on an
engine client (`_Request`) that runs the prompt as the header of a decode. Only the numbers of the
answer are ours. Other requests take vLLM's way alone.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.api.outcomes import Outcome, metrics_of
from vllm_choreo.api.pending import Pending
from vllm_choreo.errors import ChoreoError, LimitError, SpanError, UnsupportedOptionError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.params import ParentSpan
from vllm_choreo.server.errors import as_choreo_error, error_json
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.schemas import MAX_PARENTS
from vllm_choreo.server.sessions import OpenSession, Sessions, unknown_session
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.wire.messages import usage_json

_SESSION = "choreo_session"
_ARGUMENTS = {
    f"choreo_{name}": name
    for name in ("parents", "offsets", "new_offset", "save_as", "mode", "deny")
}
_PARENT = re.compile(r"(?P<id>[^\[\]]+)(\[(?P<start>\d{0,9}):(?P<stop>\d{0,9})\])?")


def init_state(state: State, llm: Any) -> None:
    """Let the handlers of vLLM's routes choreograph.

    Args:
        state: of the app, with `choreo`, the server's sessions.
        llm: an engine client that takes choreographed requests.
    """
    for name, handler in (
        ("openai_serving_completion", ChoreoServingCompletion),
        ("openai_serving_chat", ChoreoServingChat),
    ):
        serving = getattr(state, name)
        # vLLM names the classes of its handlers; the subclasses only add to them.
        serving.__class__ = handler
        serving.choreo_sessions, serving.choreo_llm = state.choreo, llm


class ChoreoServingCompletion(OpenAIServingCompletion):
    """vLLM's handler of /v1/completions."""

    async def create_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        if not choreo_keys(request.vllm_xargs):
            return await super().create_completion(request, raw_request)
        if "add_special_tokens" not in request.model_fields_set:
            # The prompt is the next piece of a text, not its beginning.
            request.add_special_tokens = False
        return await _answer(self, OpenAIServingCompletion.create_completion, request, raw_request)


class ChoreoServingChat(OpenAIServingChat):
    """vLLM's handler of /v1/chat/completions."""

    async def create_chat_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        if not choreo_keys(request.vllm_xargs):
            return await super().create_chat_completion(request, raw_request)
        return await _answer(self, OpenAIServingChat.create_chat_completion, request, raw_request)


async def _answer(
    serving: Any, create: Callable[..., Any], body: Any, raw_request: Request | None
) -> Any:
    """What vLLM's handler makes of a choreographed request.

    Raises:
        ChoreoError: the request is refused, or failed in the engine before anything was answered.
    """
    assert raw_request is not None, "requests of the routes come with it"
    sessions: Sessions = serving.choreo_sessions
    try:
        _check_form(body)
        # As they were sent: vLLM's model takes true for 1.
        arguments, session_id = _read((await raw_request.json())["vllm_xargs"])
        session = _session(sessions, tenant_of(raw_request), session_id)
        request = _Request(serving.choreo_llm, sessions, session, arguments)
        # Handlers keep nothing from request to request; this one has an engine client of its own.
        serving = copy.copy(serving)
        serving.engine_client = request
        if body.stream:
            return await _begun(request, lambda: create(serving, body, raw_request))
        try:
            answer = await create(serving, body, raw_request)
            request.is_told = request.message is not None
        finally:
            request.leave()
        if request.message is None:
            return answer
        return _with_numbers(answer, request.message)
    except (ChoreoError, EngineDeadError) as error:
        raise _in_terms_of_the_route(error) from None


async def _begun(request: _Request, create: Callable[[], Any]) -> Any:
    """The stream of an answer, once the engine has the request: what is refused has a status."""
    events = request.events(create)
    answer = await anext(events)
    if isinstance(answer, ErrorResponse):
        await events.aclose()
        return answer
    return events


# -- reading --------------------------------------------------------------------------------------


def _check_form(body: Any) -> None:
    """Refuse what does not make one message of one prompt."""
    prompt: Any = getattr(body, "prompt", None)
    is_list = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    refused = {
        "prompt": (is_list, "each call makes one message: send one prompt"),
        "prompt_embeds": (
            getattr(body, "prompt_embeds", None) is not None,
            "a message has tokens: send a prompt",
        ),
        "n": (body.n not in (None, 1), "each call makes one message: send it n times"),
        "use_beam_search": (body.use_beam_search, "beams do not make one message"),
        "echo": (body.echo, "the answer is what was generated; the message has both"),
        "cache_salt": (
            body.cache_salt is not None,
            "messages never enter the prefix cache, and are shared inside a tenant alone: leave "
            "the salt out, or use another API key",
        ),
        "stream_options.continuous_usage_stats": (
            body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
            "where the tokens came from is known at the end: ask for include_usage",
        ),
    }
    for parameter, (is_refused, advice) in refused.items():
        if is_refused:
            value = getattr(body, parameter, True)
            value = f"{len(value)} items" if isinstance(value, (list, bytes)) else value
            raise UnsupportedOptionError(advice, parameter=parameter, value=value)


def _read(xargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The arguments of `AsyncChoreography.decode`, and the session if one is named."""
    for key in choreo_keys(xargs):
        if key not in _ARGUMENTS and key != _SESSION:
            raise ChoreoError(
                f"unknown key; the keys are {', '.join((*_ARGUMENTS, _SESSION))}",
                parameter=f"vllm_xargs.{key}",
                value=xargs[key],
            )
    session_id = xargs.get(_SESSION)
    if session_id is not None and not isinstance(session_id, str):
        raise ChoreoError("the id of a session is a string", parameter="session", value=session_id)
    arguments = {name: xargs[key] for key, name in _ARGUMENTS.items() if key in xargs}
    parents = arguments.get("parents")
    if isinstance(parents, list):
        if len(parents) > MAX_PARENTS:
            raise LimitError(
                f"a call has up to {MAX_PARENTS} parents", parameter="parents", value=len(parents)
            )
        arguments["parents"] = [_parent(parent) for parent in parents]
    return arguments, session_id


def _parent(text: Any) -> ParentSpan:
    """`id`, `name` or either with `[start:stop]` behind it."""
    match = _PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SpanError(
            'a parent is "name", "session/name", or one of them with "[start:stop]" behind it',
            parameter="parents",
            value=text,
        )
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return ParentSpan(match["id"], start, stop)


def _session(sessions: Sessions, tenant: str, session_id: str | None) -> OpenSession:
    if session_id is None:
        return sessions.default_session(tenant)
    return sessions.session(tenant, session_id)


# -- running --------------------------------------------------------------------------------------


class _Request:
    """The engine client of one choreographed request: vLLM's own, but for `generate`.

    `leave` must be called when the request is over. If nobody was told of its message by then, the
    call is ended and nothing of it is kept.

    Attributes:
        message: what the request made, once it is complete.
        is_told: whether the client was sent its answer.
    """

    def __init__(
        self, llm: Any, sessions: Sessions, session: OpenSession, arguments: dict[str, Any]
    ) -> None:
        self.message: Message | None = None
        self.is_told = False
        self._llm = llm
        self._sessions = sessions
        self._session = session
        self._arguments = arguments
        self._error: ChoreoError | None = None
        self._start: Callable[[], Any] | None = None
        self._pending: Pending | None = None
        self._queue: Any = None
        self._submitted = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._is_over = False
        session.num_users += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As `AsyncLLM.generate`, for the prompt as the header of a decode."""
        assert self._start is None, "requests of several prompts are refused"
        self._start = lambda: self._submit(prompt, sampling_params, request_id, options)
        return self._outputs()

    async def _submit(
        self, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any]
    ) -> None:
        if prompt["type"] != "token":
            raise UnsupportedOptionError(
                "a message is made of text: leave pictures and sound out",
                parameter="header",
                value=prompt["type"],
            )
        params = sampling_params.clone()
        keys = choreo_keys(params.extra_args)
        params.extra_args = {k: v for k, v in params.extra_args.items() if k not in keys} or None
        if not self._sessions.is_open(self._session):
            raise unknown_session()  # it was closed while the prompt was rendered
        choreography, self._submitted = self._session.choreography, time.perf_counter()
        self._pending = choreography.begin(
            prompt["prompt_token_ids"], sampling_params=params, **self._arguments
        )
        # Nothing else runs in between: who names the message as a parent comes to the engine later.
        params = self._pending.call.params.apply(params)
        self._queue = await self._llm.add_request(request_id, prompt, params, **options)
        self._watch = asyncio.create_task(self._end_with_session(self._pending))

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        """VLLM's outputs; the last one when the message is complete."""
        if self._pending is None:
            assert self._start is not None
            await self._start()
        whole, first = None, None
        while True:
            output = self._queue.get_nowait() or await self._queue.get()
            now = time.perf_counter()
            first = now if first is None else first
            if whole is None:
                whole = output if output.finished else copy.deepcopy(output)
            else:
                whole.add(output, aggregate=True)
            if output.finished:
                metrics = metrics_of(output, self._submitted, _first_token(output, first), now)
                await self._conclude(Outcome(whole, metrics))
                output.kv_transfer_params = None  # our report, not vLLM's
                yield output
                return
            yield output

    async def _conclude(self, outcome: Outcome) -> None:
        assert self._pending is not None and self._watch is not None
        self._watch.cancel()
        self._is_over = True
        try:
            self.message = await self._session.choreography.conclude(self._pending, outcome)
        except ChoreoError as error:
            is_open = self._sessions.is_open(self._session)
            self._error = error if is_open else unknown_session()
            self._sessions.ended(self._session, "decode", self._error)
            raise self._error from None
        self._sessions.ended(self._session, "decode", self.message)

    async def _end_with_session(self, pending: Pending) -> None:
        """Closing a session ends its calls; the outputs then end with what vLLM says of that."""
        await pending.result()
        await self._llm.abort(self._queue.request_id, internal=True)

    async def events(self, create: Callable[[], Any]) -> AsyncGenerator[Any, None]:
        """VLLM's answer, which is a stream or an error; then the events of the stream.

        Whoever has taken the answer need not take any event: what is left of an abandoned
        generator is tidied up when it is collected.
        """
        stream = None
        try:
            answer = await create()
            if self._start is not None:
                stream = answer
                await self._start()
            yield answer
            if stream is not None:
                async for event in stream:
                    yield self._with_numbers(event)
        finally:
            self.leave()

    def _with_numbers(self, event: str) -> str:
        """An event of the stream: with our usage on the last, and the message's id once it is
        complete.
        """
        data = event.removeprefix("data: ")
        if not data.startswith("{"):
            return event
        chunk = json.loads(data)
        if "error" in chunk:
            if self._error is not None:
                self._sessions.refused(self._error)
                chunk = {"error": error_json(_in_terms_of_the_route(self._error))}
        else:
            usage = chunk.pop("usage", None)
            if self.message is not None:
                self.is_told = True
                chunk["choreo"] = _choreo_json(self.message)
                if usage and not chunk["choices"]:
                    chunk["usage"] = {**usage, **usage_json(self.message)}
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def leave(self) -> None:
        """The request is over."""
        if self._watch is not None:
            self._watch.cancel()
        if self._pending is None or self.is_told:
            self._release()
        else:
            self._sessions.in_background(self._drop(self._pending))

    async def _drop(self, pending: Pending) -> None:
        choreography = self._session.choreography
        try:
            if self.message is not None:
                with suppress(ChoreoError):  # somebody else freed it, or closed the session
                    await choreography.free(self.message)
            elif not self._is_over:
                if self._queue is not None:
                    await self._llm.abort(self._queue.request_id, internal=True)
                with suppress(ChoreoError):  # that it was ended
                    await choreography.conclude(pending, None)
                self._sessions.abandoned(self._session, "decode")
        finally:
            self._release()

    def _release(self) -> None:
        with self._session.used():  # its time to live begins anew
            self._session.num_users -= 1


def _first_token(output: Any, seen: float) -> float:
    """When the first token was there. Without a stream, all are seen at once: vLLM tells when."""
    told = output.metrics.first_token_ts if output.metrics is not None else 0.0
    return min(seen, told or seen)


# -- answering ------------------------------------------------------------------------------------


def _with_numbers(answer: Any, message: Message) -> Any:
    """VLLM's answer with our usage, and what the message is called."""
    answer.usage = UsageInfo(**{**answer.usage.model_dump(), **usage_json(message)})
    answer.choreo = _choreo_json(message)
    return answer


def _choreo_json(message: Message) -> dict[str, Any]:
    session = message.id.partition("/")[0]
    return {"id": message.id, "session": session, "position": message.position}


def _in_terms_of_the_route(error: Exception) -> ChoreoError:
    """The error with the name that the parameter has in a request to vLLM's routes."""
    ours = as_choreo_error(error)
    assert ours is not None
    named = {name: f"vllm_xargs.{key}" for key, name in _ARGUMENTS.items()}
    named |= {"session": f"vllm_xargs.{_SESSION}", "header": "prompt"}
    parameter = named.get(ours.parameter, ours.parameter)
    return type(ours)(ours.message, parameter=parameter, value=ours.value)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's answers to choreographed requests, with our numbers and in the terms of its routes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo

from vllm_choreo.errors import ChoreoError
from vllm_choreo.server.errors import as_choreo_error, error_json, renamed
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.openai.reading import ARGUMENTS, PREFIX_KEY, SESSION_KEY
from vllm_choreo.server.wings import prompt_arguments
from vllm_choreo.wire.messages import usage_json

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

# What the arguments of a call are called in a request to vLLM's routes.
_NAMES = {name: f"vllm_xargs.{key}" for key, name in ARGUMENTS.items()}
_NAMES |= {
    name: f"vllm_xargs.choreo_{name}"
    for name in ("auto", "auto_min_tokens", "auto_cut", "auto_context")
}
_NAMES |= {
    "session": f"vllm_xargs.{SESSION_KEY}",
    "prefix": f"vllm_xargs.{PREFIX_KEY}",
    "header": "prompt",
    "adapter": "model",
}

# Answers of vLLM's handlers.
Whole: TypeAlias = "ChatCompletionResponse | CompletionResponse | ErrorResponse"
Answer: TypeAlias = "Whole | AsyncGenerator[str, None]"


def with_numbers(answer: Whole, client: CallClient) -> Whole:
    """Add our usage to vLLM's answer if a message was made, and the message's id."""
    message = client.message
    if isinstance(answer, ErrorResponse):
        return answer
    if message is not None:
        numbers = {**usage_json(message), **client.more_usage}
        answer.usage = UsageInfo(**{**answer.usage.model_dump(), **numbers})
    if told := _choreo_json(client):
        answer.choreo = told
    return answer


def event_with_numbers(event: str, client: CallClient) -> str:
    """Add our usage to the last event of a stream, and the message's id once it is complete.

    Args:
        event: a line of server-sent events as vLLM writes it, with the empty line behind it.
    """
    data = event.removeprefix("data: ")
    if not data.startswith("{"):
        return event
    chunk = json.loads(data)
    if "error" in chunk:
        if client.error is not None:
            client.refused(client.error)
            chunk = {"error": error_json(in_terms_of_xargs(client.error))}
        return _event(chunk)
    # A message may be complete before the first of its chunks is written: the last ones tell of it.
    ends = not chunk["choices"] or any(c.get("finish_reason") for c in chunk["choices"])
    if client.is_text:
        if ends:
            chunk["choreo"] = client.more_choreo
    else:
        usage = chunk.pop("usage", None)
        if ends and client.message is not None:
            client.is_told = True
            chunk["choreo"] = _choreo_json(client)
            if usage and not chunk["choices"]:
                chunk["usage"] = {**usage, **usage_json(client.message), **client.more_usage}
    return _event(chunk)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def in_terms_of_xargs(error: Exception) -> ChoreoError:
    """The error with the name that the parameter has in a request to vLLM's routes."""
    ours = as_choreo_error(error)
    assert ours is not None
    names = {name: f"vllm_xargs.{key}" for key, name in prompt_arguments().items()}
    return renamed(ours, _NAMES | names)


def _choreo_json(client: CallClient) -> dict[str, Any]:
    message = client.message
    if message is None:
        return client.more_choreo
    session = message.id.partition("/")[0]
    named = {"id": message.id, "session": session, "position": message.position}
    return {**named, **client.more_choreo}

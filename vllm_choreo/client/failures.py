# SPDX-License-Identifier: Apache-2.0
"""Errors between client and server, which name the server and the way out."""

from __future__ import annotations

import json
from typing import Any

import httpx

from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.errors import ChoreoError, FreedMessageError
from vllm_choreo.wire.refusals import refusal_of

_START = "`vllm serve MODEL --plugin choreo`"
_MAX_CHARS = 200  # of an answer that is quoted


class ServerError(ChoreoError):
    """No answer, or none that a server of vllm-choreo gives.

    Attributes:
        may_have_run: the request may have reached the engine. It was not repeated.
    """

    def __init__(
        self,
        message: str,
        *,
        parameter: str = "base_url",
        value: object = None,
        may_have_run: bool = False,
    ) -> None:
        super().__init__(message, parameter=parameter, value=value)
        self.may_have_run = may_have_run

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {"may_have_run": self.may_have_run}


def no_answer(endpoint: Endpoint, error: httpx.HTTPError) -> ServerError:
    """The error for a request that was not answered."""
    base_url = endpoint.base_url
    reason = str(error) or type(error).__name__
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)):
        return ServerError(
            f"no server can be reached ({reason}): start one with {_START}, or correct the address",
            value=base_url,
        )
    if isinstance(error, httpx.TimeoutException):
        return ServerError(
            f"no answer within {endpoint.timeout:g} s, so the request was given up: raise timeout, "
            "or ask for fewer tokens",
            value=base_url,
            may_have_run=True,
        )
    return ServerError(
        f"the connection broke before the answer was complete ({reason}); the request may have "
        "run and was not repeated: look at the server's log, then call again",
        value=base_url,
        may_have_run=True,
    )


def connection_cut_error(endpoint: Endpoint) -> ServerError:
    """The error for a stream that ended before its message."""
    return no_answer(endpoint, httpx.RemoteProtocolError("the stream ended early"))


def closed(session: str) -> FreedMessageError:
    """The error for a call on a client that was closed."""
    return FreedMessageError(
        "the session is closed and its messages are freed; open another client",
        parameter="session",
        value=session,
    )


def content_of(endpoint: Endpoint, status: int, body: bytes) -> dict[str, Any]:
    """The JSON of an answer.

    Raises:
        ChoreoError: the server's refusal, by its class.
        ServerError: the answer is none of a server of vllm-choreo.
    """
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if 200 <= status < 300 and isinstance(content, dict):
        return content
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        refusal = refusal_of(error)
        # vLLM itself refuses requests under types that are not ours.
        if type(refusal).__name__ == error.get("type") or status in (400, 413, 422):
            raise refusal
    raise ServerError(_advice(status, body), value=endpoint.base_url, may_have_run=status >= 500)


def _advice(status: int, body: bytes) -> str:
    """Advice on an answer that is not understood."""
    if status in (401, 403):
        return "the server does not accept the API key: pass the one it was started with as api_key"
    if status == 404:
        return f"the server does not choreograph: start it with {_START}, or correct the address"
    text = " ".join(body[: 4 * _MAX_CHARS].decode("utf-8", "replace").split())[:_MAX_CHARS]
    if status == 503:
        return f"the server is not ready ({text}): wait, or restart it"
    if status < 400:
        return f"this is no server of vllm-choreo (status {status}: {text}): correct the address"
    return f"the server failed (status {status}: {text}): look at its log, then call again"

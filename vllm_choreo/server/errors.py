# SPDX-License-Identifier: Apache-2.0
"""Errors as answers: which status a `ChoreoError` has, and the form of its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    UnknownKeptError,
    UnknownKeyError,
    UnknownMessageError,
    UnknownSchemaError,
    UnknownSessionError,
)
from vllm_choreo.wire.answer import AnswerObject
from vllm_choreo.wire.refusals import ErrorContent, refusal_json

_STATUS: dict[type[ChoreoError], int] = {
    UnknownKeyError: 401,
    UnknownSessionError: 404,
    UnknownKeptError: 404,
    NameTakenError: 409,
    LimitError: 429,
    EngineRestartedError: 503,
}
# The one limit that no later request can meet unchanged.
BODY_LIMIT = "max_request_bytes"
# The parameter of a message that is missing where the path of the request should lead. A body may
# have a field of this name, too: a wrong one.
PATH_NAME = "name"
_MISSING = (UnknownMessageError, FreedMessageError, UnknownSchemaError)


class ErrorAnswer(AnswerObject):
    """A request that was refused, or failed, as a whole."""

    error: ErrorContent


class UnauthorizedAnswer(AnswerObject):
    """vLLM's answer where no API key, or a wrong one, was sent."""

    error: Literal["Unauthorized"]


def status_of(error: ChoreoError) -> int:
    """The HTTP status of an error; 400 for what the caller can mend."""
    if isinstance(error, LimitError) and error.parameter == BODY_LIMIT:
        return 413
    if error.parameter == PATH_NAME and isinstance(error, _MISSING):
        return 404
    return _STATUS.get(type(error), 400)


def error_json(error: ChoreoError, status: int | None = None) -> ErrorContent:
    """The value of `error` in an answer; `status` where it is not that of the class."""
    return refusal_json(error, status_of(error) if status is None else status)


def error_response(error: ChoreoError, status: int | None = None) -> JSONResponse:
    """The answer to a request that failed as a whole."""
    content = error_json(error, status)
    return JSONResponse({"error": content}, status_code=content["code"])


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that is refused as a whole, at whichever route."""
    assert isinstance(error, ChoreoError)
    request.app.state.choreo.refused(error)
    return error_response(error)


def renamed(error: ChoreoError, names: Mapping[str, str]) -> ChoreoError:
    """The error with the name of its parameter in a request.

    Args:
        names: names of parameters in a request, by those in Python; others keep theirs.
    """
    parameter = names.get(error.parameter, error.parameter)
    return type(error)(error.message, parameter=parameter, value=error.value)


def as_choreo_error(error: Exception) -> ChoreoError | None:
    """`error` in our terms, if it is one of ours, of vLLM's checks, or the end of the engine.

    None: an error of the server itself, which vLLM answers with 500.
    """
    if isinstance(error, ChoreoError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineRestartedError(
            "the engine has ended, and its messages with it; open a new session when the server is "
            "back, and make them again",
            parameter="session",
        )
    if isinstance(error, VLLMClientError):
        return ChoreoError(
            str(error.args[0] if error.args else error),
            parameter=getattr(error, "parameter", None) or "sampling_params",
            value=getattr(error, "value", None),
        )
    # vLLM's input processor refuses some options with plain errors of Python.
    if isinstance(error, (ValueError, TypeError, OverflowError)):
        return ChoreoError(str(error), parameter="sampling_params")
    return None

# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: bounded, strict JSON, and errors in our own terms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_choreo.errors import ChoreoError, LimitError, OffsetError, SpanError
from vllm_choreo.server.answers import JsonAnswer
from vllm_choreo.server.errors import BODY_LIMIT, as_choreo_error, renamed
from vllm_choreo.server.schemas import CallBody, SamplingBody
from vllm_choreo.server.strict_json import MAX_PART_CHARS, read_json
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.server.work_pool import WorkPool

CLIENT_GONE = 499  # nobody reads it; it is seen in vLLM's metrics of requests

# What follows a body that is too long is read and dropped, so that its sender comes to read the
# answer; but not for ever.
_DROPPED_BODIES = 16


# Of a body that is read at once, in about a millisecond.
_FEW_BYTES = 64 * 2**10


def check_num_bytes(num_bytes: int, limit: int) -> None:
    """Check that a body is within the limit.

    Raises:
        LimitError: it is too long.
    """
    if num_bytes > limit:
        raise LimitError(
            f"a request has up to {limit} bytes: send it in parts, or raise the server's "
            f"setting choreo.server.{BODY_LIMIT}",
            parameter=BODY_LIMIT,
        )


async def parse_body(content: bytes, work: WorkPool, tenant: str) -> Any:
    """Parse a body of JSON: a long one in the tenant's turn, off the event loop.

    Raises:
        LimitError, ChoreoError: as for `read_json`.
    """
    if len(content) <= _FEW_BYTES:
        return read_json(content)
    return await work.run(tenant, read_json, content)


class BoundedRequest(Request):
    """A request whose body is not longer than the server's limit, and JSON."""

    async def body(self) -> bytes:
        """Read the body, up to the server's limit.

        Raises:
            LimitError: the body is too long, whether or not its sender said so before.
        """
        if not hasattr(self, "_body"):
            limit = self.app.state.choreo.config.max_request_bytes
            chunks: list[bytes] = []
            num_bytes = 0
            async for chunk in self.stream():
                num_bytes += len(chunk)
                if num_bytes <= limit:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                if num_bytes > _DROPPED_BODIES * limit:
                    break
            check_num_bytes(num_bytes, limit)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            LimitError: as for `body`.
            ChoreoError: as for `read_json`, or it is not said to be JSON.
        """
        if not hasattr(self, "_json"):
            content = await self.body()
            content_type = self.headers.get("Content-Type", "")
            if content_type.partition(";")[0].strip().lower() != "application/json":
                raise ChoreoError(
                    "send JSON, under the header Content-Type: application/json",
                    parameter="Content-Type",
                    value=content_type,
                )
            self._json = await parse_body(content, self.app.state.choreo.work, tenant_of(self))
        return self._json


class ChoreoRoute(APIRoute):
    """A route with bounded bodies, whose errors are `ChoreoError`s.

    One that returns a `JsonAnswer` is described by its form; FastAPI neither checks nor copies it.
    """

    def __init__(self, path: str, endpoint: Callable[..., object], **options: object) -> None:
        returned = get_type_hints(endpoint).get("return")
        if get_origin(returned) is JsonAnswer:
            (options["response_model"],) = get_args(returned)
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            request = BoundedRequest(request.scope, request.receive)
            try:
                if self.body_field is not None and await request.body():
                    # Parsed before FastAPI asks for it, which would hide why it cannot be.
                    await request.json()
                response: Response = await handle(request)
                return response
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except RequestValidationError as error:
                raise _refusal(error.errors()[0]) from None
            except Exception as error:
                ours = as_choreo_error(error)
                if ours is None:
                    raise
                raise renamed(ours, _NAMES) from error

        return checked


# What arguments of Python are called in a body.
_NAMES = {"header": "content", "tokens": "content", "message": "copy_of"}
_NAMES |= {name: f"sampling_params.{name}" for name in SamplingBody.model_fields}
# Where a wrong value has an error class of its own, by the field that it stands in.
_CLASSES: dict[str, type[ChoreoError]] = {
    "offsets": OffsetError,
    "new_offset": OffsetError,
    "start": SpanError,
    "stop": SpanError,
}
_MESSAGES = {
    "missing": "this field is needed",
    "extra_forbidden": "unknown field",
    "model_type": "an object is needed",
    "model_attributes_type": "an object is needed",
}


def _refusal(error: Mapping[str, Any]) -> ChoreoError:
    """Error about the first thing that pydantic found wrong."""
    parts = _path(error["loc"])
    field = next((part for part in reversed(parts) if not part.isdigit()), "")
    message = _MESSAGES.get(error["type"], error["msg"])
    if error["type"] == "extra_forbidden":
        message += suggestion(field, [*CallBody.model_fields, *SamplingBody.model_fields])
    return _CLASSES.get(field, ChoreoError)(
        message[:1].lower() + message[1:],
        parameter=".".join(parts) or "body",
        # Of a missing field, pydantic gives the whole object around it.
        value=None if error["type"] == "missing" else _outline(error.get("input")),
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Part of a sentence that asks whether another name was meant; empty if none is close."""
    found = get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _path(location: Sequence[Any]) -> list[str]:
    """Fields and indices in pydantic's location, such as `calls 2 parents 0 start`.

    The part of the request in front, and tags of unions (<tag>) between, are left out.
    """
    return [str(part)[:MAX_PART_CHARS] for part in location[1:] if str(part)[0:1] not in ("<", "[")]


def _outline(value: object) -> object:
    """`value`, or type and length of a list or object: an error is not to repeat a megabyte."""
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return value

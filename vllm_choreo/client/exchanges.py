# SPDX-License-Identifier: Apache-2.0
"""Requests to a server and readers of their answers: all of a client that does no I/O.

An `Exchange` is a request and the reader of its answer; both clients send the one and pass the
other on. What can be seen without the session is refused here, by the same errors as
`Choreography` raises; the rest is for the server to judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from vllm_choreo.errors import ChoreoError, RepairError, UnknownMessageError
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.semantics.call import Answer, Asked, CallSpec, Result
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Message, Saved
from vllm_choreo.semantics.naming import message_id, message_ids
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.wire.calls import adapter_name, call_json
from vllm_choreo.wire.messages import message_of
from vllm_choreo.wire.refusals import refusal_of

_SESSIONS = "/v1/choreo/sessions"
_KEPT = "/v1/choreo/kept"
_END = "[DONE]"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """An HTTP request: `path` follows the server's address, `body` is JSON."""

    method: str
    path: str
    body: bytes | None = None


@dataclass(frozen=True)
class Exchange(Generic[_T]):
    """A request, and what its answer means.

    Attributes:
        read: function of the answer's JSON and of the time of the request, on the clock of
            `time.perf_counter`, that makes the result. Raises ChoreoError: a call failed.
    """

    request: Request
    read: Callable[[dict[str, Any], float], _T]


# -- sessions ------------------------------------------------------------------------------------


def opening(options: SessionOptions) -> Exchange[str]:
    """Open a session, and read its id.

    Raises:
        RepairError: no such rule, or profiles of several pairs, which are a server's own.
    """
    if isinstance(options.repair, Path) and options.repair.is_dir():
        raise RepairError(
            "profiles of several pairs are those of a server (--choreo-pair DIR): leave repair out",
            parameter="repair",
            value=str(options.repair),
        )
    rule = session_rule(options.repair, options.mode)
    fields = {
        "mode": options.mode,
        "ttl_seconds": options.ttl_seconds,
        "adapter": adapter_name(options.adapter),
        "placement": options.placement,
        "repair": rule and rule.to_json(),
    }
    given = {key: value for key, value in fields.items() if value is not None}
    body = json_of(given, "ttl_seconds")
    return Exchange(Request("POST", _SESSIONS, body), lambda answer, _: str(answer["id"]))


def stats(session: str) -> Exchange[dict[str, Any]]:
    """The numbers of a session, all on one level."""
    return Exchange(Request("GET", f"{_SESSIONS}/{session}"), lambda answer, _: _stats_of(answer))


def closing(session: str) -> Exchange[None]:
    """Close a session."""
    return Exchange(Request("DELETE", f"{_SESSIONS}/{session}"), _nothing)


def _stats_of(body: Mapping[str, Any]) -> dict[str, Any]:
    about = {key: value for key, value in body.items() if key not in ("object", "usage")}
    return {**about, **body["usage"]}


def _nothing(body: object, submitted: float) -> None:
    """Read an answer that says no more than that it was done."""


# -- calls ---------------------------------------------------------------------------------------


def running(session: str, asked: Asked[Answer]) -> Exchange[Answer]:
    """Run calls, and answer when all are complete: a list, or the one that is given."""
    calls = [call_json(spec) for spec in asked.calls]
    body = {"calls": calls} if asked.is_list else calls[0]
    request = Request("POST", f"{_SESSIONS}/{session}/messages", json_of(body, "calls"))

    def read(answer: Mapping[str, Any], submitted: float) -> Answer:
        items = answer["data"] if asked.is_list else [answer]
        return asked.answer([result_of(item, submitted) for item in items])

    return Exchange(request, read)


def streaming(session: str, specs: Sequence[CallSpec]) -> Request:
    """Run a list of calls, and answer as they go on."""
    body = {"calls": [call_json(spec) for spec in specs], "stream": True}
    return Request("POST", f"{_SESSIONS}/{session}/messages", json_of(body, "calls"))


def result_of(body: Mapping[str, Any], submitted: float) -> Result:
    """Read the result of a call: a message object, or that of an error."""
    if body["object"] == "error":
        return refusal_of(body["error"])
    return message_of(body, submitted)


def is_chunk(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a stream is a piece of a message, not its end."""
    return bool(event["object"] == "choreo.message.chunk")


class Events:
    """The objects of a stream of server-sent events, as the bytes come in.

    Bytes are cut at line feeds only: text in JSON may hold the other ends of lines.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The objects that are complete with `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.decode().partition(":")
            if name == "data" and value.strip() != _END:
                yield json.loads(value)


def tokenizing(text: str) -> Exchange[tuple[int, ...]]:
    """Ask for the tokens of a text, at vLLM's own path; no special tokens are added."""
    body = {"prompt": text, "add_special_tokens": False}
    request = Request("POST", "/tokenize", json_of(body, "text"))
    return Exchange(request, lambda answer, _: tuple(answer["tokens"]))


# -- messages ------------------------------------------------------------------------------------


def fetching(session: str, named: Named) -> Exchange[Message]:
    """Ask for a message; `metrics.submitted` is 0, for it is not on the client's clock."""
    request = Request("GET", _message_path(session, named))
    return Exchange(request, lambda answer, _: message_of(answer, submitted=0.0))


def tracing(session: str, named: Named) -> Exchange[frozenset[str]]:
    """Ask for the ids of all messages that a message carries traces of."""
    request = Request("GET", f"{_message_path(session, named)}/provenance")
    return Exchange(request, lambda answer, _: frozenset(answer["provenance"]))


def operating(
    session: str, operation: str, messages: Sequence[Named], ttl: float | None = None
) -> Exchange[None]:
    """Free, evict, pin or unpin messages: done as a whole or refused as a whole."""
    body: dict[str, Any] = {"messages": list(message_ids(messages, "messages"))}
    if ttl is not None:
        body["ttl_seconds"] = ttl
    path = f"{_SESSIONS}/{session}/messages/{operation}"
    return Exchange(Request("POST", path, json_of(body, "ttl")), _nothing)


def saving(
    session: str, messages: Sequence[Named] | None, name: str, encodings: bool
) -> Exchange[Saved]:
    """Save messages under a name; None: all of the session."""
    ids = None if messages is None else list(message_ids(messages, "messages"))
    body = {"name": name, "messages": ids, "encodings": encodings}
    request = Request("POST", f"{_SESSIONS}/{session}/save", json_of(body, "uri"))
    names = [field.name for field in fields(Saved)]
    return Exchange(request, lambda answer, _: Saved(**{field: answer[field] for field in names}))


def loading(session: str, name: str, on_mismatch: str) -> Exchange[list[Message]]:
    """Load what was saved under a name; `metrics.submitted` is that of the load."""
    body = {"name": name, "on_mismatch": on_mismatch}
    request = Request("POST", f"{_SESSIONS}/{session}/load", json_of(body, "uri"))
    return Exchange(request, lambda answer, now: [message_of(m, now) for m in answer["data"]])


def deleting_saved(name: str) -> Exchange[None]:
    """Delete what was saved under a name."""
    escaped = quote(str(name), safe="", errors="replace").replace(".", "%2E")
    return Exchange(Request("DELETE", f"{_KEPT}/{escaped}"), lambda answer, _: None)


def _message_path(session: str, named: Named) -> str:
    """Return the path of a message, or refuse one of another session."""
    found = message_id(named, "messages")
    owner, slash, name = found.partition("/")
    if not slash:
        owner, name = session, found
    if owner != session or not name or "/" in name:
        raise UnknownMessageError("no message of this session", parameter="messages", value=found)
    # Names hold dots, and "." and ".." are steps in a path.
    escaped = quote(name, safe="", errors="replace").replace(".", "%2E")
    return f"{_SESSIONS}/{session}/messages/{escaped}"


def json_of(body: Mapping[str, Any], parameter: str) -> bytes:
    """A body. Raises ChoreoError: JSON cannot carry it."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ChoreoError(
            f"this cannot be sent as JSON ({error})", parameter=parameter, value=body
        ) from error

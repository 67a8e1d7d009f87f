# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a call to its JSON. Pure functions, shared by both clients.

What can be seen without the session is refused here, by the same errors as `Choreography` raises;
the rest is for the server to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from vllm_choreo.client.sampling import sampling_fields
from vllm_choreo.errors import ChoreoError, UnknownMessageError, UnsupportedOptionError
from vllm_choreo.semantics.params import ChoreoParams, ParentSpan

_SESSIONS = "/v1/choreo/sessions"
# With a list of calls, these may be given once for all of them.
_FOR_ALL = ("sampling_params", "mode", "deny")
_OPTIONS = ("parents", "offsets", "new_offset", "save_as", *_FOR_ALL)
# What a call is of: the keys, and the kind of call that each makes.
_CONTENTS = {"header": "decode", "tokens": "prefill", "copy_of": "prefill"}

PREFILL_ARGUMENTS = ("parents", "offsets", "new_offset", "save_as", "mode", "deny")
DECODE_ARGUMENTS = (*PREFILL_ARGUMENTS, "sampling_params")


@dataclass(frozen=True)
class Request:
    """An HTTP request: `path` follows the server's address, `body` is JSON."""

    method: str
    path: str
    body: bytes | None = None


# -- the requests --------------------------------------------------------------------------------


def opening(mode: str, ttl_seconds: float | None) -> Request:
    """Open a session."""
    ttl = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
    return Request("POST", _SESSIONS, _json({"mode": mode, **ttl}, "ttl_seconds"))


def reading(session: str) -> Request:
    """Ask for the numbers of a session."""
    return Request("GET", f"{_SESSIONS}/{session}")


def fetching(session: str, message: Any) -> Request:
    """Ask for a message."""
    (path,) = _message_paths(session, [message])
    return Request("GET", path)


def closing(session: str) -> Request:
    """Close a session."""
    return Request("DELETE", f"{_SESSIONS}/{session}")


def running(session: str, calls: Sequence[dict[str, Any]], many: bool) -> Request:
    """Run calls, and answer when all are complete: a list, or the one that is given."""
    body = {"calls": list(calls)} if many else calls[0]
    return Request("POST", f"{_SESSIONS}/{session}/messages", _json(body, "calls"))


def streaming(session: str, calls: Sequence[dict[str, Any]]) -> Request:
    """Run a list of calls, and answer as they go on."""
    body = {"calls": list(calls), "stream": True}
    return Request("POST", f"{_SESSIONS}/{session}/messages", _json(body, "calls"))


def freeing(session: str, messages: Sequence[Any]) -> list[Request]:
    """Free messages, one after the other."""
    return [Request("DELETE", path) for path in _message_paths(session, messages)]


def evicting(session: str, messages: Sequence[Any]) -> list[Request]:
    """Drop the cached keys and values of messages, one after the other."""
    return [Request("POST", f"{path}/evict") for path in _message_paths(session, messages)]


def pinning(session: str, messages: Sequence[Any], ttl: float | None) -> list[Request]:
    """Pin messages, one after the other."""
    body = _json({} if ttl is None else {"ttl_seconds": ttl}, "ttl")
    paths = _message_paths(session, messages)
    return [Request("POST", f"{path}/pin", body) for path in paths]


def unpinning(session: str, messages: Sequence[Any]) -> list[Request]:
    """Unpin messages, one after the other."""
    return [Request("DELETE", f"{path}/pin") for path in _message_paths(session, messages)]


def _message_paths(session: str, messages: Sequence[Any]) -> list[str]:
    """Where messages are. None of them is asked for if one is of another session."""
    paths = []
    for named in messages:
        message_id = id_of(named, "messages")
        owner, slash, name = message_id.partition("/")
        if not slash:
            owner, name = session, message_id
        if owner != session or not name or "/" in name:
            raise UnknownMessageError(
                "no message of this session", parameter="messages", value=message_id
            )
        # Names hold dots, and "." and ".." are steps in a path.
        escaped = quote(name, safe="", errors="replace").replace(".", "%2E")
        paths.append(f"{_SESSIONS}/{session}/messages/{escaped}")
    return paths


def _json(body: Any, parameter: str) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ChoreoError(
            f"this cannot be sent as JSON ({error})", parameter=parameter, value=body
        ) from error


def check_arguments(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse arguments that a method does not have. Raises TypeError."""
    for name in arguments:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}; the arguments are {', '.join(known)}")


# -- the calls -----------------------------------------------------------------------------------


def calls_of(
    kind: str, tokens: Any, shared: Mapping[str, Any], denied: Sequence[str]
) -> tuple[list[dict[str, Any]], bool]:
    """The JSON of a call, or of each call of a list.

    Args:
        kind: "prefill" or "decode".
        tokens: text, token ids, or a list of dicts.
        shared: the other arguments of the call by name; None means not given.
        denied: ids of messages that are denied to every call, besides those in `shared`.

    Returns:
        The calls, and whether a list was asked for.

    Raises:
        ChoreoError: the first reason why a call is refused.
    """
    shared = {**shared, "deny": [*denied, *ids_of(shared.get("deny"), "deny")]}
    if isinstance(tokens, Sequence) and bool(tokens) and isinstance(tokens[0], Mapping):
        items = [_item(item, shared, ("tokens", "header")) for item in tokens]
        return [_call(kind, item) for item in items], True
    return [_call(kind, {**shared, "tokens": tokens})], False


def one_call(
    kind: str, tokens: Any, arguments: Mapping[str, Any], denied: Sequence[str]
) -> dict[str, Any]:
    """The JSON of a call that may not be a list.

    Raises:
        ChoreoError: it is a list, or as `calls_of`.
    """
    calls, many = calls_of(kind, tokens, arguments, denied)
    if many:
        raise ChoreoError("a list of calls needs decode or prefill", parameter="header")
    return calls[0]


def each_call(items: Sequence[Any], denied: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON of calls of both kinds, which tell by their keys what they are.

    Raises:
        ChoreoError: as `calls_of`.
    """
    full = [_item(item, {"deny": list(denied)}, tuple(_CONTENTS)) for item in items]
    kinds = [next(kind for key, kind in _CONTENTS.items() if key in item) for item in items]
    return [_call(kind, item) for kind, item in zip(kinds, full, strict=True)]


def _item(item: Any, shared: Mapping[str, Any], contents: Sequence[str]) -> dict[str, Any]:
    """One dict of a list, checked and completed with what is given for all of them."""
    if not isinstance(item, Mapping):
        raise ChoreoError("a parallel list holds dicts alone", parameter="tokens", value=item)
    for key, value in shared.items():
        if key not in _FOR_ALL and value is not None:
            raise ChoreoError(
                f"with a list of calls, give {key} in each dict", parameter=key, value=value
            )
    known = {*_OPTIONS, *contents}
    for key in item:
        if key not in known:
            raise ChoreoError(
                f"unknown key; the keys are {', '.join(sorted(known))}",
                parameter=str(key),
                value=item[key],
            )
    if sum(key in item for key in contents) != 1:
        raise ChoreoError(
            f"each dict needs either {' or '.join(contents)}",
            parameter=contents[0],
            value=dict(item),
        )
    full = {**shared, **item, "deny": [*shared["deny"], *ids_of(item.get("deny"), "deny")]}
    full["tokens"] = item.get("header", item.get("tokens"))
    return full


def _call(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """One call as JSON; what was not given is left out."""
    # Refuses offsets and sub-spans of the wrong type or number, as the engine does.
    params = ChoreoParams(
        parents=tuple(_span(parent, "parents") for parent in _list(item.get("parents"), "parents")),
        offsets=item.get("offsets"),
        new_offset=item.get("new_offset"),
        kind=kind,
        deny=tuple(dict.fromkeys(item["deny"])),
    )
    call = {
        "type": kind,
        **_content(kind, item),
        "parents": [_span_json(span) for span in params.parents] or None,
        "offsets": None if params.offsets is None else list(params.offsets),
        "new_offset": params.new_offset,
        "save_as": item.get("save_as"),
        "mode": item.get("mode"),
        "deny": list(params.deny) or None,
        "sampling_params": _sampling(kind, item.get("sampling_params")),
    }
    return {key: value for key, value in call.items() if value is not None}


def _content(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """The new tokens: text, token ids, or the message whose tokens are taken."""
    if item.get("copy_of") is not None:
        return {"copy_of": _span_json(_span(item["copy_of"], "message"))}
    name = "header" if kind == "decode" else "tokens"
    tokens = item["tokens"]
    if isinstance(tokens, str):
        return {"content": tokens}
    if not isinstance(tokens, Sequence) or isinstance(tokens, (bytes, bytearray)):
        raise ChoreoError(
            f"{name} must be text, token ids, or a list of dicts", parameter=name, value=tokens
        )
    for token in tokens:
        if type(token) is not int:
            raise ChoreoError(
                "a token id is an int; for parallel calls give a list of dicts",
                parameter=name,
                value=token,
            )
    return {"content": list(tokens)}


def _sampling(kind: str, given: Any) -> dict[str, Any] | None:
    if kind == "prefill" and given is not None:
        raise UnsupportedOptionError(
            "prefill samples nothing: leave sampling_params out, or call decode",
            parameter="sampling_params",
            value=given,
        )
    return sampling_fields(given)


# -- messages by their names ---------------------------------------------------------------------


def id_of(named: Any, parameter: str) -> str:
    """The id or name of a message, of a pending call, of an id, or of a `save_as` name."""
    message_id = named if isinstance(named, str) else getattr(named, "id", None)
    if not isinstance(message_id, str):
        raise ChoreoError(
            "a message is named by its Message or its id", parameter=parameter, value=named
        )
    return message_id


def ids_of(messages: Any, parameter: str) -> list[str]:
    """The ids or names of a list of messages; None is an empty one."""
    return [id_of(named, parameter) for named in _list(messages, parameter)]


def _list(given: Any, parameter: str) -> Sequence[Any]:
    if given is None:
        return ()
    # A message, too, is no list; that it is no `Sequence` is what tells.
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ChoreoError(
            f"{parameter} must be a list of messages", parameter=parameter, value=given
        )
    return given


def _span(parent: Any, parameter: str) -> ParentSpan:
    if isinstance(parent, str) or not isinstance(parent, Sequence):
        return ParentSpan(id_of(parent, parameter))
    if len(parent) != 3:
        raise ChoreoError(
            "a parent is a message, an id, or (message, start, stop)",
            parameter=parameter,
            value=parent,
        )
    named, start, stop = parent
    return ParentSpan(id_of(named, parameter), start, stop)


def _span_json(span: ParentSpan) -> str | dict[str, Any]:
    """An id alone, or with the ends that were given."""
    ends = {"start": span.start, "stop": span.stop}
    given = {key: end for key, end in ends.items() if end is not None}
    return {"id": span.id, **given} if given else span.id

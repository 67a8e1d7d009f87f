# SPDX-License-Identifier: Apache-2.0
"""Choreographed requests to vLLM's routes: the keys in `vllm_xargs`, and what else is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from vllm_choreo.errors import (
    ChoreoError,
    LimitError,
    PrefixError,
    SpanError,
    UnsupportedOptionError,
)
from vllm_choreo.repair.rules import rule_given
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.server.body import check_num_bytes, parse_body, suggestion
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.openai.auto_options import AUTO_KEYS
from vllm_choreo.server.schemas import MAX_PARENTS
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.server.wings import Body, prompt_arguments
from vllm_choreo.server.work_pool import WorkPool

if TYPE_CHECKING:
    pass

SESSION_KEY = "choreo_session"
# The arguments of a decode, by key.
ARGUMENTS = {
    f"choreo_{name}": name
    for name in (
        *("parents", "offsets", "new_offset", "save_as", "mode", "deny", "repair", "layers"),
        *("keep_hidden", "role"),
    )
}
# Token ids with which the rendered prompt begins, and which the parents stand for.
PREFIX_KEY = "choreo_prefix"
_TYPE_KEY = "choreo_type"  # a field of a call on the other routes
_PARENT = re.compile(r"(?P<id>[^\[\]]+)(\[(?P<start>\d{0,9}):(?P<stop>\d{0,9})\])?")


def check_form(body: Body) -> None:
    """Refuse what does not make one message of one prompt.

    Raises:
        UnsupportedOptionError: it does not.
    """
    for parameter, (is_refused, advice) in _refused(body).items():
        if is_refused:
            value = getattr(body, parameter, True)
            value = f"{len(value)} items" if isinstance(value, (list, bytes)) else value
            raise UnsupportedOptionError(advice, parameter=parameter, value=value)


def _refused(body: Body) -> dict[str, tuple[bool, str]]:
    """Options, by name: True for each that is refused, and what to do instead."""
    prompt = getattr(body, "prompt", None)
    is_list = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    options = body.stream_options
    return {
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
            options is not None and bool(options.continuous_usage_stats),
            "where the tokens came from is known at the end: ask for include_usage",
        ),
    }


async def read_sent(request: Request, work: WorkPool, max_bytes: int) -> Mapping[str, Any]:
    """Read a choreographed request's body as it was sent.

    vLLM's model takes true for 1, and of two equal keys the last.

    Raises:
        LimitError: it is too long.
        ChoreoError: as `read_json`.
    """
    content = await request.body()
    check_num_bytes(len(content), max_bytes)
    body: Mapping[str, Any] = await parse_body(content, work, tenant_of(request))
    return body


def read_arguments(xargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The arguments of `AsyncChoreography.decode` and of wings, and the session if one is named.

    Raises:
        LimitError: too many parents.
        ChoreoError: an unknown key, or a value that has not the form of its key.
    """
    keys = {**ARGUMENTS, **prompt_arguments(), PREFIX_KEY: "prefix"}
    for key in choreo_keys(xargs):
        if key == _TYPE_KEY:
            raise ChoreoError(
                'requests on this route generate: POST {"type": "prefill", "content": text} to '
                "/v1/choreo/sessions/SESSION/messages to encode a text alone",
                parameter=f"vllm_xargs.{key}",
                value=xargs[key],
            )
        if key not in keys and key != SESSION_KEY:
            raise ChoreoError(
                f"unknown key {key!r}{suggestion(key, [*keys, *AUTO_KEYS])}; the keys are "
                f"{', '.join((*keys, SESSION_KEY))}, and of chats that name no parents "
                f"{', '.join(AUTO_KEYS)}",
                parameter=f"vllm_xargs.{key}",
                value=xargs[key],
            )
    session_id = xargs.get(SESSION_KEY)
    if session_id is not None and not isinstance(session_id, str):
        raise ChoreoError("the id of a session is a string", parameter="session", value=session_id)
    arguments = {name: xargs[key] for key, name in keys.items() if key in xargs}
    parents = arguments.get("parents")
    if isinstance(parents, list):
        if len(parents) > MAX_PARENTS:
            raise LimitError(
                f"a call has up to {MAX_PARENTS} parents", parameter="parents", value=len(parents)
            )
        arguments["parents"] = [_parent(parent) for parent in parents]
    if "prefix" in arguments:
        _check_prefix(arguments["prefix"])
    if isinstance(arguments.get("repair"), str):
        arguments["repair"] = rule_given(arguments["repair"])
    return arguments, session_id


def _check_prefix(prefix: object) -> None:
    """Check that a prefix is a list of token ids.

    Raises:
        PrefixError: it is no list of ints.
    """
    if not (isinstance(prefix, list) and all(type(token) is int for token in prefix)):
        raise PrefixError(
            "the prefix is a list of token ids, as /tokenize gives them",
            parameter="prefix",
            value=prefix if isinstance(prefix, str) else type(prefix).__name__,
        )


def _parent(text: object) -> ParentSpan:
    """Parse a parent: `id`, `name` or either with `[start:stop]` behind it."""
    match = _PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SpanError(
            'a parent is "name", "session/name", or one of them with "[start:stop]" behind it',
            parameter="parents",
            value=text,
        )
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return ParentSpan(match["id"], start, stop)

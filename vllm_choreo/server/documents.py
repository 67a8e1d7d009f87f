# SPDX-License-Identifier: Apache-2.0
"""Answers to clients, as pydantic models, for /openapi.json: `answers.py` writes the same forms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerModel(BaseModel):
    """Every answer: fields of these types, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid")


# -- sessions ------------------------------------------------------------------------------------


class SessionUsage(AnswerModel):
    """Contents of a session, and how much it may hold."""

    messages: int
    tokens: int
    resident_tokens: int = Field(
        description="Those whose keys and values are cached now; others are encoded again when "
        "they are read."
    )
    pinned_messages: int
    max_messages: int
    max_tokens: int


class SessionAnswer(AnswerModel):
    """A session."""

    id: str = Field(examples=["8f14e45fceea167a5a36dedd4bea2543"])
    object: Literal["choreo.session"]
    created: int = Field(description="Seconds since 1970.")
    mode: Literal["choreo", "exact", "baseline"]
    ttl_seconds: float
    expires_at: int = Field(description="When it is closed if nobody uses it; seconds since 1970.")
    max_model_len: int = Field(description="Tokens that a call reads and writes, at most.")
    model: str
    adapter: str | None = Field(description="Of calls that name none; null: the model alone.")
    placement: Literal["prefill", "decode", "both"] | None = Field(
        description="Which calls use the adapter; null: there is none."
    )
    repair: str | dict[str, Any] | None = Field(description="Of calls that name none; null: none.")
    usage: SessionUsage


class ClosedAnswer(AnswerModel):
    """A session that was closed."""

    id: str
    object: Literal["choreo.session.deleted"]
    deleted: Literal[True]


# -- messages ------------------------------------------------------------------------------------


class ParentAnswer(AnswerModel):
    """A parent, and which of its tokens were read; null: from the first, to the end."""

    id: str
    start: int | None
    stop: int | None


class CachedTokens(AnswerModel):
    """Cached tokens, as in OpenAI's API."""

    cached_tokens: int


class UsageAnswer(AnswerModel):
    """Tokens that a call read and wrote, and where they came from."""

    prompt_tokens: int = Field(description="Of the parents, and of the header.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    exact: bool = Field(
        description="The result is that of an ordinary request on the concatenated text."
    )
    reused_tokens: int = Field(description="Read from the cache.")
    repositioned_tokens: int = Field(
        description="Those of them that were seen at another position than they were encoded at."
    )
    encoded_tokens: int = Field(description="Computed for this call, generated ones included.")
    repaired_tokens: int = Field(
        description="Of the parents, read as they are encoded in the call's own context (`repair`)."
    )
    untrusted: bool = Field(
        description="It depends on keys and values that were loaded, and not saved by this server."
    )


class Times(AnswerModel):
    """Times of a call, in seconds from its submission."""

    waiting: float | None = Field(description="Until it was first scheduled; null: not known.")
    ttft: float = Field(description="To the first token; of a prefill, until it was encoded.")
    latency: float = Field(description="To the end.")


class LogprobAnswer(AnswerModel):
    """Logprob of a token at one position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class ShortMessageAnswer(AnswerModel):
    """A message in the list of a session's messages."""

    id: str = Field(description="`session/name`.")
    object: Literal["choreo.message"]
    created: int = Field(description="Seconds since 1970.")
    session: str
    type: Literal["prefill", "decode"]
    num_tokens: int
    position: int = Field(description="Of its first token when it was encoded.")
    parents: list[ParentAnswer]
    finish_reason: str | None


class MessageAnswer(ShortMessageAnswer):
    """A message."""

    offsets: list[int | None] | None = Field(
        description="Where the call asked its parents to be seen; null: one after the other."
    )
    new_offset: int | None = Field(
        description="Where it asked the message to stand; null: after the last parent."
    )
    role: str | None = Field(description="What it is in its workflow, as its call said.")
    text: str = Field(description="What was sent, then what was generated.")
    token_ids: list[int]
    generated_text: str
    generated_token_ids: list[int]
    logprobs: list[dict[str, LogprobAnswer]] | None = Field(
        description="Of each generated token: from token ids to their logprobs; null: not asked."
    )
    usage: UsageAnswer
    metrics: Times


class MessageListAnswer(AnswerModel):
    """The messages of a session."""

    object: Literal["list"]
    data: list[ShortMessageAnswer]


class FreedAnswer(AnswerModel):
    """A message that was freed."""

    id: str
    object: Literal["choreo.message.deleted"]
    deleted: Literal[True]


class EvictedAnswer(AnswerModel):
    """A message that is no longer cached, and is encoded again when it is read."""

    id: str
    object: Literal["choreo.message"]
    evicted: Literal[True]


class PinAnswer(AnswerModel):
    """A message that is evicted last until its pin expires, or that is not pinned."""

    id: str
    object: Literal["choreo.message"]
    pinned: bool
    ttl_seconds: float | None


class FreedListAnswer(AnswerModel):
    """Messages that were freed."""

    object: Literal["list"]
    data: list[FreedAnswer]


class EvictedListAnswer(AnswerModel):
    """Messages that are no longer cached."""

    object: Literal["list"]
    data: list[EvictedAnswer]


class PinListAnswer(AnswerModel):
    """Messages that are pinned, or not."""

    object: Literal["list"]
    data: list[PinAnswer]


class ProvenanceAnswer(AnswerModel):
    """Messages that a message carries traces of."""

    id: str
    object: Literal["choreo.provenance"]
    provenance: list[str] = Field(
        description="Ids of messages, freed ones among them; the message itself is left out."
    )


# -- errors and lists ----------------------------------------------------------------------------


class ErrorContent(AnswerModel):
    """Error: what is wrong, and what to do instead."""

    message: str
    type: str = Field(examples=["UnknownMessageError"])
    param: str | None = Field(examples=["parents"])
    value: str | None = Field(description="What was given, as short text.")
    code: int = Field(description="The HTTP status.")


class ErrorAnswer(AnswerModel):
    """A request that was refused, or failed, as a whole."""

    error: ErrorContent


class UnauthorizedAnswer(AnswerModel):
    """vLLM's answer where no API key, or a wrong one, was sent."""

    error: Literal["Unauthorized"]


class FailedCallAnswer(AnswerModel):
    """A call of a list that failed; the others are not affected, unless they read its message."""

    object: Literal["error"]
    error: ErrorContent


class ResultsAnswer(AnswerModel):
    """Results of all calls of a list, in its order; the usage of all of them."""

    object: Literal["list"]
    data: list[MessageAnswer | FailedCallAnswer]
    usage: UsageAnswer


class ChunkAnswer(AnswerModel):
    """An event of a stream: what a call generated since the last one."""

    object: Literal["choreo.message.chunk"]
    index: int = Field(description="Of the call in the list.")
    id: str
    text: str
    token_ids: list[int]


class MessageEvent(MessageAnswer):
    """An event of a stream: a call's message."""

    index: int


class FailedCallEvent(FailedCallAnswer):
    """An event of a stream: a call that failed."""

    index: int


# -- for the routes ------------------------------------------------------------------------------

_DESCRIPTIONS = {
    400: "A value that is refused; `param` names it.",
    401: "No API key, or a wrong one.",
    404: "No such session of yours, no such message in it, or nothing of yours under this name.",
    409: "A message of this name exists, or existed.",
    413: "The body is longer than `max_request_bytes`.",
    429: "A limit is reached; `param` names the setting.",
    503: "The engine has ended, and its messages with it.",
}


# Of every route.
COMMON: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "Any other error."}
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, besides those that every route has."""
    return {
        status: {
            "model": UnauthorizedAnswer if status == 401 else ErrorAnswer,
            "description": _DESCRIPTIONS[status],
        }
        for status in statuses
    }


PAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}}
}

RESULTS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": MessageAnswer | ResultsAnswer,
        "description": (
            "The message of one call, or the results of a list of calls. With `stream`: events "
            "`data: {...}` as they come, and `data: [DONE]` at the end. An event is a piece of a "
            "message (`choreo.message.chunk`), or the message or the error that a call came to; "
            "`index` is that of the call."
        ),
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "examples": {
                    "piece": {
                        "value": (
                            'data: {"object":"choreo.message.chunk","index":0,'
                            '"id":"8f14e45fceea167a5a36dedd4bea2543/answer","text":" red",'
                            '"token_ids":[2654]}\n\n'
                        )
                    }
                },
            }
        },
    }
}

# SPDX-License-Identifier: Apache-2.0
"""`Message` <-> JSON: in the answers of a server, and in transcripts.

Both hold the same record of a message; an answer adds what a client may want to know of it, a
transcript when it was submitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_choreo.semantics.message import Message, Metrics, TokenLogprob, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.wire.answer import AnswerObject, Doc

# From the clock of `time.perf_counter`, on which calls are timed, to seconds since 1970.
_EPOCH = time.time() - time.perf_counter()
# JSON knows no infinity; vLLM's own routes answer the same for a token that was masked.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token, like `vllm.logprobs.Logprob`; `rank` 1: likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# -- forms ---------------------------------------------------------------------------------------


class ParentAnswer(AnswerObject):
    """A parent, and which of its tokens were read; null: from the first, to the end."""

    id: str
    start: int | None
    stop: int | None


class CachedTokens(AnswerObject):
    """Cached tokens, as in OpenAI's API."""

    cached_tokens: int


class UsageCounts(AnswerObject):
    """Tokens of a call by where they came from: `Usage`."""

    exact: Annotated[
        bool, Doc("The result is that of an ordinary request on the concatenated text.")
    ]
    reused_tokens: Annotated[int, Doc("Read from the cache.")]
    repositioned_tokens: Annotated[
        int, Doc("Those of them that were seen at another position than they were encoded at.")
    ]
    encoded_tokens: Annotated[int, Doc("Computed for this call, generated ones included.")]
    repaired_tokens: Annotated[
        int,
        Doc("Of the parents, read as they are encoded in the call's own context (`repair`)."),
    ]
    untrusted: Annotated[
        bool,
        Doc("It depends on keys and values that were loaded, and not saved by this server."),
    ]


class UsageAnswer(UsageCounts):
    """Tokens that a call read and wrote, and where they came from."""

    prompt_tokens: Annotated[int, Doc("Of the parents, and of the header.")]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Times(AnswerObject):
    """Times of a call, in seconds from its submission."""

    waiting: Annotated[float | None, Doc("Until it was first scheduled; null: not known.")]
    ttft: Annotated[float, Doc("To the first token; of a prefill, until it was encoded.")]
    latency: Annotated[float, Doc("To the end.")]


class LogprobAnswer(AnswerObject):
    """Logprob of a token at one position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class ShortMessageAnswer(AnswerObject):
    """A message in the list of a session's messages."""

    id: Annotated[str, Doc("`session/name`.")]
    object: Literal["choreo.message"]
    created: Annotated[int, Doc("Seconds since 1970.")]
    session: str
    type: Literal["prefill", "decode"]
    num_tokens: int
    position: Annotated[int, Doc("Of its first token when it was encoded.")]
    parents: list[ParentAnswer]
    finish_reason: str | None


class MessageContent(AnswerObject):
    """Texts of a message, and what its call asked for."""

    offsets: Annotated[
        list[int | None] | None,
        Doc("Where the call asked its parents to be seen; null: one after the other."),
    ]
    new_offset: Annotated[
        int | None, Doc("Where it asked the message to stand; null: after the last parent.")
    ]
    role: Annotated[str | None, Doc("What it is in its workflow, as its call said.")]
    text: Annotated[str, Doc("What was sent, then what was generated.")]
    token_ids: list[int]
    num_pictures: Annotated[int, Doc("Pictures that the call was given, among these tokens.")]
    generated_text: str
    generated_token_ids: list[int]
    metrics: Times


class MessageFields(ShortMessageAnswer, MessageContent):
    """A message, but for its usage."""

    logprobs: Annotated[
        list[dict[str, LogprobAnswer]] | None,
        Doc("Of each generated token: from token ids to their logprobs; null: not asked."),
    ]
    prompt_logprobs: Annotated[
        list[dict[str, LogprobAnswer] | None] | None,
        Doc("The same of each token that was sent, null for the first; null: not asked."),
    ]


class MessageAnswer(MessageFields):
    """A message."""

    usage: UsageAnswer


class MessageRecord(MessageContent):
    """A message in transcripts, and in what is saved."""

    id: str
    position: int
    num_tokens: int
    finish_reason: str | None
    usage: UsageCounts


# -- writing -------------------------------------------------------------------------------------


def record_json(message: Message) -> MessageRecord:
    """Record of a message in answers and transcripts; logprobs are left out."""
    metrics = message.metrics
    return {
        "id": message.id,
        "position": message.position,
        "offsets": None if message.offsets is None else list(message.offsets),
        "new_offset": message.new_offset,
        "role": message.role,
        "num_tokens": message.num_tokens,
        "token_ids": list(message.token_ids),
        "num_pictures": message.num_pictures,
        "text": message.text,
        "generated_token_ids": list(message.generated_token_ids),
        "generated_text": message.generated_text,
        "finish_reason": message.finish_reason,
        "usage": _counts_json(message.usage),
        "metrics": {"waiting": metrics.waiting, "ttft": metrics.ttft, "latency": metrics.latency},
    }


def message_json(message: Message) -> MessageAnswer:
    """The message object of an answer."""
    return {
        **short_message_json(message),
        **record_json(message),
        "logprobs": _logprobs_json(message.logprobs),
        "prompt_logprobs": _prompt_logprobs_json(message.prompt_logprobs),
        "usage": usage_json(message),
    }


def short_message_json(message: Message) -> ShortMessageAnswer:
    """A message in the list of a session: without its text and what follows from it."""
    return {
        "id": message.id,
        "object": "choreo.message",
        "created": int(_EPOCH + message.metrics.submitted),
        "session": message.id.partition("/")[0],
        "type": "prefill" if message.finish_reason is None else "decode",
        "num_tokens": message.num_tokens,
        "position": message.position,
        "parents": [
            {"id": span.id, "start": span.start, "stop": span.stop} for span in message.parents
        ],
        "finish_reason": message.finish_reason,
    }


def usage_json(message: Message) -> UsageAnswer:
    """`usage` of an answer: of OpenAI's form, with our numbers, in tokens.

    The prompt is what the call read: its parents and its header. Whatever a call reads or writes
    is either reused or encoded, so their sum is the total.
    """
    return _usage_json(message.usage, len(message.generated_token_ids))


def total_usage_json(messages: Sequence[Message]) -> UsageAnswer:
    """The sums over `messages`; exact if all of them are."""
    parts = [message.usage for message in messages]
    total = Usage(
        exact=all(part.exact for part in parts),
        reused_tokens=sum(part.reused_tokens for part in parts),
        repositioned_tokens=sum(part.repositioned_tokens for part in parts),
        encoded_tokens=sum(part.encoded_tokens for part in parts),
        repaired_tokens=sum(part.repaired_tokens for part in parts),
        untrusted=any(part.untrusted for part in parts),
    )
    return _usage_json(total, sum(len(message.generated_token_ids) for message in messages))


def _usage_json(usage: Usage, num_generated: int) -> UsageAnswer:
    total = usage.reused_tokens + usage.encoded_tokens
    return {
        "prompt_tokens": total - num_generated,
        "completion_tokens": num_generated,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        **_counts_json(usage),
    }


def _counts_json(usage: Usage) -> UsageCounts:
    return {
        "exact": usage.exact,
        "reused_tokens": usage.reused_tokens,
        "repositioned_tokens": usage.repositioned_tokens,
        "encoded_tokens": usage.encoded_tokens,
        "repaired_tokens": usage.repaired_tokens,
        "untrusted": usage.untrusted,
    }


def _logprobs_json(
    logprobs: Sequence[Mapping[int, TokenLogprob]] | None,
) -> list[dict[str, LogprobAnswer]] | None:
    """Logprobs of the generated tokens, as vLLM gives them: one map per token, from token ids."""
    return None if logprobs is None else [_at_position_json(found) for found in logprobs]


def _prompt_logprobs_json(
    logprobs: Sequence[Mapping[int, TokenLogprob] | None] | None,
) -> list[dict[str, LogprobAnswer] | None] | None:
    """Logprobs of the tokens that were sent; None for those that have none."""
    if logprobs is None:
        return None
    return [None if found is None else _at_position_json(found) for found in logprobs]


def _at_position_json(at_position: Mapping[int, TokenLogprob]) -> dict[str, LogprobAnswer]:
    return {
        str(token): {
            "logprob": value.logprob if math.isfinite(value.logprob) else _LEAST_LOGPROB,
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }
        for token, value in at_position.items()
    }


# -- reading -------------------------------------------------------------------------------------


def message_of(body: Mapping[str, Any], submitted: float) -> Message:
    """The message of a record, with what an answer adds to it.

    Args:
        body: message object of an answer, or of a transcript.
        submitted: time at which the call was submitted, on the clock of `time.perf_counter`.
    """
    metrics = body["metrics"]
    return Message(
        id=body["id"],
        text=body["text"],
        token_ids=tuple(body["token_ids"]),
        num_tokens=body["num_tokens"],
        position=body["position"],
        parents=tuple(map(_span_of, body["parents"])),
        generated_text=body["generated_text"],
        generated_token_ids=tuple(body["generated_token_ids"]),
        logprobs=_logprobs_of(body.get("logprobs")),
        finish_reason=body["finish_reason"],
        usage=Usage.of(body["usage"]),
        metrics=Metrics(submitted, metrics["waiting"], metrics["ttft"], metrics["latency"]),
        offsets=None if body.get("offsets") is None else tuple(body["offsets"]),
        new_offset=body.get("new_offset"),
        role=body.get("role"),
        prompt_logprobs=_prompt_logprobs_of(body.get("prompt_logprobs")),
        num_pictures=body.get("num_pictures", 0),
    )


def _span_of(parent: Mapping[str, Any] | Sequence[Any]) -> ParentSpan:
    """A parent as answers write it, or as transcripts do: `[id, start, stop]`."""
    return ParentSpan(**parent) if isinstance(parent, Mapping) else ParentSpan(*parent)


def _logprobs_of(
    entries: Sequence[Mapping[str, Mapping[str, Any]]] | None,
) -> list[dict[int, Logprob]] | None:
    return None if entries is None else [_at_position_of(entry) for entry in entries]


def _prompt_logprobs_of(
    entries: Sequence[Mapping[str, Mapping[str, Any]] | None] | None,
) -> list[dict[int, Logprob] | None] | None:
    if entries is None:
        return None
    return [None if entry is None else _at_position_of(entry) for entry in entries]


def _at_position_of(entry: Mapping[str, Mapping[str, Any]]) -> dict[int, Logprob]:
    return {int(token): Logprob(**found) for token, found in entry.items()}

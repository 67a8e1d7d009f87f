# SPDX-License-Identifier: Apache-2.0
"""Messages, lists and sessions as JSON. `schemas.py` describes the same forms to OpenAPI."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.params import ParentSpan
from vllm_choreo.server.errors import error_json

# From the clock of `time.perf_counter`, on which calls are timed, to seconds since 1970.
_EPOCH = time.time() - time.perf_counter()
# JSON knows no infinity; vLLM's own routes answer the same for a token that was masked.
_LEAST_LOGPROB = -9999.0


def usage_json(message: Message) -> dict[str, Any]:
    """`usage`, of OpenAI's form and with our numbers, in tokens.

    The prompt is what the call read: its parents and its header. Whatever a call reads or writes
    is either reused or encoded, so their sum is the total.
    """
    usage = message.usage
    completion = len(message.generated_token_ids)
    return _usage(
        usage.reused_tokens + usage.encoded_tokens - completion,
        completion,
        exact=usage.exact,
        reused=usage.reused_tokens,
        repositioned=usage.repositioned_tokens,
        encoded=usage.encoded_tokens,
    )


def total_usage_json(messages: Sequence[Message]) -> dict[str, Any]:
    """The sums over `messages`; exact if all of them are."""
    parts = [usage_json(message) for message in messages]
    return _usage(
        sum(part["prompt_tokens"] for part in parts),
        sum(part["completion_tokens"] for part in parts),
        exact=all(part["exact"] for part in parts),
        reused=sum(part["reused_tokens"] for part in parts),
        repositioned=sum(part["repositioned_tokens"] for part in parts),
        encoded=sum(part["encoded_tokens"] for part in parts),
    )


def _usage(
    prompt: int, completion: int, *, exact: bool, reused: int, repositioned: int, encoded: int
) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "exact": exact,
        "reused_tokens": reused,
        "repositioned_tokens": repositioned,
        "encoded_tokens": encoded,
    }


def message_json(message: Message) -> dict[str, Any]:
    """The message object."""
    metrics = message.metrics
    return {
        **short_message_json(message),
        "text": message.text,
        "token_ids": list(message.token_ids),
        "generated_text": message.generated_text,
        "generated_token_ids": list(message.generated_token_ids),
        "logprobs": _logprobs_json(message.logprobs),
        "usage": usage_json(message),
        "metrics": {
            "waiting": metrics.waiting,
            "ttft": metrics.ttft,
            "latency": metrics.latency,
        },
        "provenance": sorted(message.provenance),
    }


def short_message_json(message: Message) -> dict[str, Any]:
    """A message in the list of a session: without its text and what follows from it."""
    return {
        "id": message.id,
        "object": "choreo.message",
        "created": int(_EPOCH + message.metrics.submitted),
        "session": message.id.partition("/")[0],
        "type": "prefill" if message.finish_reason is None else "decode",
        "num_tokens": message.num_tokens,
        "position": message.position,
        "parents": [_parent_json(parent) for parent in message.parents],
        "finish_reason": message.finish_reason,
    }


def results_json(results: Sequence[Message | ChoreoError]) -> dict[str, Any]:
    """What a list of calls came to, in its order; the usage of those that made a message."""
    messages = [result for result in results if isinstance(result, Message)]
    return list_json([result_json(result) for result in results]) | {
        "usage": total_usage_json(messages)
    }


def result_json(result: Message | ChoreoError) -> dict[str, Any]:
    """One item of a list of results."""
    if isinstance(result, ChoreoError):
        return {"object": "error", "error": error_json(result)}
    return message_json(result)


def list_json(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A list as OpenAI's API writes it."""
    return {"object": "list", "data": list(items)}


def _parent_json(parent: ParentSpan) -> dict[str, Any]:
    return {"id": parent.id, "start": parent.start, "stop": parent.stop}


def _logprobs_json(logprobs: Any) -> list[dict[str, Any]] | None:
    """VLLM's logprobs of the generated tokens: one map per token, from token ids."""
    if logprobs is None:
        return None
    return [
        {
            str(token): {
                "logprob": value.logprob if math.isfinite(value.logprob) else _LEAST_LOGPROB,
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in at_position.items()
        }
        for at_position in logprobs
    ]

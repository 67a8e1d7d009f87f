# SPDX-License-Identifier: Apache-2.0
"""Results of calls and of operations as JSON. `documents.py` describes them to OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.errors import error_json
from vllm_choreo.wire.messages import message_json, total_usage_json


def results_json(results: Sequence[Result]) -> dict[str, Any]:
    """Results of a list of calls, in its order, with the usage of those that made a message."""
    messages = [result for result in results if isinstance(result, Message)]
    return list_json([result_json(result) for result in results]) | {
        "usage": total_usage_json(messages)
    }


def result_json(result: Result) -> dict[str, Any]:
    """One item of a list of results."""
    if isinstance(result, ChoreoError):
        return {"object": "error", "error": error_json(result)}
    return message_json(result)


def list_json(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A list as OpenAI's API writes it."""
    return {"object": "list", "data": list(items)}


# -- what was done to a message --------------------------------------------------------------------


def freed_json(message: Message) -> dict[str, Any]:
    """Answer about a message that was freed."""
    return {"id": message.id, "object": "choreo.message.deleted", "deleted": True}


def evicted_json(message: Message) -> dict[str, Any]:
    """Answer about a message that was evicted."""
    return {"id": message.id, "object": "choreo.message", "evicted": True}


def pin_json(message: Message, seconds: float | None) -> dict[str, Any]:
    """Answer about a message that was pinned for `seconds`; None: it was unpinned."""
    return {
        "id": message.id,
        "object": "choreo.message",
        "pinned": seconds is not None,
        "ttl_seconds": seconds,
    }

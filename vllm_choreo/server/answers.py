# SPDX-License-Identifier: Apache-2.0
"""Lists of results as JSON, and errors among them. `documents.py` describes them to OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.errors import error_json
from vllm_choreo.wire.messages import message_json, total_usage_json


def results_json(results: Sequence[Result]) -> dict[str, Any]:
    """What a list of calls came to, in its order; the usage of those that made a message."""
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

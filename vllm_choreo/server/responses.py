# SPDX-License-Identifier: Apache-2.0
"""Answers that /openapi.json describes besides what routes return: errors, streams, a page."""

from __future__ import annotations

from typing import Any

from vllm_choreo.server.answers import ResultsAnswer
from vllm_choreo.server.errors import ErrorAnswer, UnauthorizedAnswer
from vllm_choreo.wire.messages import MessageAnswer

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

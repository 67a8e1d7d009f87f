# SPDX-License-Identifier: Apache-2.0
"""Ordinary requests get the same bytes from a server with the plugin as from one without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_choreo.testing.server import MODEL_NAME, Server, start_server

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TEXT = "Anna owns a red bicycle. Bob owns a blue car. " * 8
TURNS = [{"role": "user", "content": "What colour is the car?"}]
SCHEMA = {
    "type": "object",
    "properties": {"owner": {"enum": ["Anna", "Bob"]}},
    "required": ["owner"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
GREEDY = {"temperature": 0, "max_tokens": 8}

# path, body; in this order, for some find in the prefix cache what others have left
REQUESTS: dict[str, tuple[str, Any]] = {
    "completion": ("/v1/completions", {"prompt": TEXT, **GREEDY}),
    "cached": ("/v1/completions", {"prompt": TEXT + "So", **GREEDY}),
    "salted": ("/v1/completions", {"prompt": TEXT, "cache_salt": "salt", **GREEDY}),
    "seeded": ("/v1/completions", {"prompt": "One", "seed": 5, "n": 2, "max_tokens": 8}),
    "prompts": ("/v1/completions", {"prompt": ["One", "Two"], **GREEDY}),
    "ids": ("/v1/completions", {"prompt": [5, 6, 7], "return_token_ids": True, **GREEDY}),
    "echo": ("/v1/completions", {"prompt": "One", "echo": True, "logprobs": 2, **GREEDY}),
    "prompt logprobs": ("/v1/completions", {"prompt": "One", "prompt_logprobs": 1, **GREEDY}),
    "stop": ("/v1/completions", {"prompt": "1, 2, 3,", "stop": [" 5"], **GREEDY}),
    "beams": ("/v1/completions", {"prompt": "One", "use_beam_search": True, "n": 2, **GREEDY}),
    "other arguments": ("/v1/completions", {"prompt": "One", "vllm_xargs": {"a": 1}, **GREEDY}),
    "stream": ("/v1/completions", {"prompt": "One", "stream": True, **GREEDY}),
    "chat": ("/v1/chat/completions", {"messages": TURNS, **GREEDY}),
    "chat logprobs": (
        "/v1/chat/completions",
        {"messages": TURNS, "logprobs": True, "top_logprobs": 2, **GREEDY},
    ),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": TURNS, "stream": True, "stream_options": {"include_usage": True}, **GREEDY},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
            **GREEDY,
            "max_tokens": 40,
        },
    ),
    "tool": (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "tools": [TOOL],
            "tool_choice": "required",
            **GREEDY,
            "max_tokens": 60,
        },
    ),
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "hot": ("/v1/completions", {"prompt": "One", "temperature": -1}),
    "no prompt": ("/v1/completions", {"max_tokens": 1}),
    "too long": ("/v1/completions", {"prompt": TEXT * 80, **GREEDY}),
    "empty chat": ("/v1/chat/completions", {"messages": []}),
    "no object": ("/v1/completions", []),
    "no model": ("/v1/completions", {"model": "nobody", "prompt": "One"}),
    "no route": ("/v1/nothing", {}),
}
# What differs from run to run of one server, and where it stands in an answer.
_CHANCE = (
    (rb'"(id|request_id)":"[^"]*"', rb'"\1":"?"'),
    (rb'"(created|created_at)":\d+', rb'"\1":0'),
)
_HEADERS = ("content-type", "content-length", "transfer-encoding")


def answers(server: Server) -> dict[str, tuple[Any, ...]]:
    """Of each request: status, headers and body."""
    with server.client() as client:
        return {name: _answer(client, *request) for name, request in REQUESTS.items()}


def _answer(client: httpx.Client, path: str, body: Any) -> tuple[Any, ...]:
    if isinstance(body, dict):
        body = {"model": MODEL_NAME, **body}
    answer = client.post(path, json=body)
    content = answer.content
    for pattern, instead in _CHANCE:
        content = re.sub(pattern, instead, content)
    headers = [answer.headers.get(name) for name in _HEADERS]
    return answer.status_code, headers, content


def test_the_plugin_changes_no_byte(
    whole_server: Server, embedded_model_path: Path, tmp_path: Path
) -> None:
    # The plugin chose blocks of 32 tokens, and the prefix cache finds whole ones.
    options = {"plugin": None, "block_size": 32, "env": {"VLLM_PLUGINS": ""}}
    with start_server(embedded_model_path, tmp_path, **options) as server:
        assert not _has_routes(server) and _has_routes(whole_server)
        for _ in range(3):  # on a busy machine vLLM may send several tokens as one event
            stock, ours = answers(server), answers(whole_server)
            if stock == ours:
                break
    assert [status for status, *_ in stock.values()].count(200) >= 18, stock
    different = [name for name in REQUESTS if stock[name] != ours[name]]
    assert not different, json.dumps(
        {n: [str(stock[n]), str(ours[n])] for n in different}, indent=1
    )


def _has_routes(server: Server) -> bool:
    return "/v1/choreo/" in httpx.get(f"{server.base_url}/openapi.json").text

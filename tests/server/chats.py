# SPDX-License-Identifier: Apache-2.0
"""Chats that name no messages, over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

from vllm_choreo.testing.server import KEYS, Server

Chat = list[dict[str, Any]]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def ask_chat(
    server: Server,
    messages: Chat,
    auto: str | None = None,
    *,
    key: str = KEYS[0],
    headers: dict[str, str] | None = None,
    stream: bool = False,
    xargs: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The JSON of a chat's answer, streams put together; `auto` None: the request says nothing."""
    keys = {**({} if auto is None else {"choreo_auto": auto}), **(xargs or {})}
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": 6,
        "temperature": 0,
        "return_token_ids": True,
        **({"vllm_xargs": keys} if keys else {}),
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        **options,
    }
    with server.client(key) as client:
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = _merge_events(answer.text) if stream else answer.json()
    return result


def _merge_events(events: str) -> dict[str, Any]:
    """The answer that a stream amounts to."""
    lines = re.findall(r"^data: (\{.*)$", events, re.MULTILINE)
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    prompt = next(ids for chunk in chunks if (ids := chunk.get("prompt_token_ids")))
    choice = {"token_ids": tokens, "message": {"content": text}}
    return {**chunks[-1], "choices": [choice], "prompt_token_ids": prompt}


def tokens_of(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Of the prompt and of the answer."""
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as a message of the next chat."""
    return turn("assistant", answer["choices"][0]["message"]["content"])

# SPDX-License-Identifier: Apache-2.0
"""Answers of a server to chat requests, read from their bytes: whole, or a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChatAnswer:
    """An answer to a chat request.

    Attributes:
        is_message: whether the answer is a message of a session, and complete.
        header, tokens: token ids of the message that were encoded, and that were generated.
        content: text of the answer; "" if it has none.
        tool_calls: name and arguments of each; arguments are JSON.
        usage: the answer's usage; empty if it tells none.
    """

    is_message: bool
    header: tuple[int, ...]
    tokens: tuple[int, ...]
    content: str
    tool_calls: tuple[tuple[str, str], ...]
    usage: Mapping[str, Any]

    @property
    def encoded_tokens(self) -> int:
        """Tokens that the engine ran, as the usage tells."""
        if "encoded_tokens" in self.usage:
            return int(self.usage["encoded_tokens"])
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return int(self.usage.get("total_tokens", 0)) - int(cached)

    def is_told_by(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message of a chat says what this answer said, and nothing else."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return (
            bool(self.tokens)
            and (message.get("content") or "") == self.content
            and [(call["name"], _arguments(call["arguments"])) for call in calls]
            == [(name, _arguments(arguments)) for name, arguments in self.tool_calls]
        )


def read_answer(content: bytes) -> ChatAnswer:
    """Read an answer from JSON or from server-sent events."""
    is_message = False
    usage: Mapping[str, Any] = {}
    header: list[int] = []
    tokens: list[int] = []
    text = ""
    calls: dict[int, list[str]] = {}
    for part in _parts(content):
        is_message |= "choreo" in part
        usage = part.get("usage") or usage
        header = part.get("prompt_token_ids") or header
        for choice in part.get("choices") or ():
            tokens += choice.get("token_ids") or ()
            said = choice.get("delta") or choice.get("message") or {}
            text += said.get("content") or ""
            for position, call in enumerate(said.get("tool_calls") or ()):
                told = calls.setdefault(call.get("index", position), ["", ""])
                for place, key in enumerate(("name", "arguments")):
                    told[place] += (call.get("function") or {}).get(key) or ""
    tool_calls = tuple((name, arguments) for name, arguments in calls.values())
    return ChatAnswer(is_message, tuple(header), tuple(tokens), text, tool_calls, usage)


def _parts(content: bytes) -> Iterator[dict[str, Any]]:
    """JSON objects of an answer; of one that broke off those that came."""
    lines = content.splitlines() if content.startswith(b"data:") else [content]
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            try:
                yield json.loads(data)
            except ValueError:
                return


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text

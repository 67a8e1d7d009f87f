# SPDX-License-Identifier: Apache-2.0
"""What a server answered to a chat request, read from its bytes: whole, or a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChatAnswer:
    """
    Attributes:
        is_message: whether it is a message of a session, and complete.
        header, tokens: of the message: what was encoded, and what was generated.
        content: its text; "" if it has none.
        tool_calls: name and arguments of each; arguments are JSON.
        usage: as the answer tells; empty if it does not.
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
        """Whether a message of a chat says what this answer said, and nothing else."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return (
            bool(self.tokens)
            and (message.get("content") or "") == self.content
            and [(call["name"], _arguments(call["arguments"])) for call in calls]
            == [(name, _arguments(arguments)) for name, arguments in self.tool_calls]
        )


def read_answer(content: bytes) -> ChatAnswer:
    """The answer that `content` holds: JSON, or server-sent events."""
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
    """Its JSON objects. An answer that broke off has those that came."""
    lines = content.splitlines() if content.startswith(b"data:") else [content]
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            try:
                yield json.loads(data)
            except ValueError:
                return


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

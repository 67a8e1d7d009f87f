# SPDX-License-Identifier: Apache-2.0
"""Answers as server-sent events: pieces as they are generated, each call's message at its end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message, Piece
from vllm_choreo.server.answers import ChunkAnswer, FailedCallEvent, MessageEvent, failed_json
from vllm_choreo.server.running import Run
from vllm_choreo.wire.messages import message_json

Event: TypeAlias = ChunkAnswer | MessageEvent | FailedCallEvent


class EventStream(StreamingResponse):
    """The events of `run`, and its end: also if the client goes away before the first of them.

    Args:
        told: makes what the client is sent of a call's index and event; None: nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        run: Run,
        told: Callable[[int, Event], Mapping[str, object] | None] = lambda _, event: event,
    ) -> None:
        super().__init__(self._events(), headers={"Cache-Control": "no-store"})
        self._run = run
        self._told = told
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.leave(is_answered=self._is_complete)

    async def _events(self) -> AsyncIterator[str]:
        async for index, event in self._run.events():
            if (told := self._told(index, self._event_json(index, event))) is not None:
                yield _line(told)
        # Before the last line goes out: a client may close the connection when it has read it.
        self._is_complete = True
        yield "data: [DONE]\n\n"

    def _event_json(self, index: int, event: Piece | Result) -> Event:
        if isinstance(event, ChoreoError):
            return {**failed_json(event), "index": index}
        if isinstance(event, Message):
            return {**message_json(event), "index": index}
        return {
            "object": "choreo.message.chunk",
            "index": index,
            "id": self._run.pending[index].id,
            "text": event.text,
            "token_ids": list(event.token_ids),
        }


def _line(event: Mapping[str, object]) -> str:
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n"

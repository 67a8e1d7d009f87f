# SPDX-License-Identifier: Apache-2.0
"""A call of an `AsyncChoreography` that was submitted and is not complete yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any, Protocol

from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Result, ended
from vllm_choreo.semantics.message import Message, Piece

if TYPE_CHECKING:
    from vllm import RequestOutput


class OutputQueue(Protocol):
    """Queue of a request's outputs, as `AsyncLLM.add_request` returns it."""

    request_id: str

    def get_nowait(self) -> RequestOutput | None: ...

    async def get(self) -> RequestOutput: ...

    def close(self) -> None: ...


class Pending:
    """A submitted call. `await` it for its `Message`; name it as a parent before that.

    Attributes:
        id: the id that its message will have.
        call: the call as it was planned.
    """

    def __init__(self, call: PlannedCall) -> None:
        self.id = call.id
        self.call = call
        self._queue: OutputQueue | None = None  # the engine's outputs, once it knows the call
        self._latest: Outcome | None = None
        self._changed = asyncio.Event()
        self._future: asyncio.Future[Result] | None = None

    @property
    def is_task(self) -> bool:
        """Return whether the session runs the call; False: somebody else reads its outputs."""
        return isinstance(self._future, asyncio.Task)

    def __await__(self) -> Generator[Any, None, Message]:
        return self._message().__await__()

    async def _message(self) -> Message:
        result = await self.result()
        if isinstance(result, ChoreoError):
            raise result
        return result

    async def result(self) -> Result:
        """Wait for the call's message, or for its error."""
        assert self._future is not None
        try:
            # Shielded: that one of several readers gives up does not stop the call for the others.
            return await asyncio.shield(self._future)
        except asyncio.CancelledError:
            if self._future.cancelled():
                return ended()
            raise

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Yield all that was generated so far, each time that there is more. For one reader."""
        assert self._future is not None
        self._future.add_done_callback(lambda _: self._changed.set())
        while not self._future.done():
            await self._changed.wait()
            self._changed.clear()
            if self._latest is not None:
                yield self._latest

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the newly generated text and tokens; the last piece carries the message.

        Raises:
            ChoreoError: the call failed.
        """
        num_chars = num_tokens = 0
        async for outcome in self.outcomes():
            completion = outcome.output.outputs[0]
            text, token_ids = completion.text[num_chars:], completion.token_ids[num_tokens:]
            if self.call.is_decode and (text or token_ids):
                num_chars, num_tokens = len(completion.text), len(completion.token_ids)
                yield Piece(text, tuple(token_ids))
        message = await self
        text = message.generated_text[num_chars:]
        yield Piece(text, message.generated_token_ids[num_tokens:], message)

    def _update(self, outcome: Outcome) -> None:
        self._latest = outcome
        self._changed.set()

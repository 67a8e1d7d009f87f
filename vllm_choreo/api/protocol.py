# SPDX-License-Identifier: Apache-2.0
"""What every facade offers, so that one program runs on any of them.

    Facade           Choreography (in any mode), ChoreoClient, Replay, benchmarks' Script
    SessionFacade    Choreography (in any mode), ChoreoClient
    AsyncFacade      AsyncChoreography, AsyncChoreoClient

Workflows need a `Facade`. Each class says in its own file which of them it is, and mypy checks it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Protocol, Unpack

from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.call_options import DecodeOptions, ReadOptions
from vllm_choreo.semantics.message import Message, Piece


class Facade(Protocol):
    """Makes messages. See `Choreography` for what the methods do."""

    @property
    def mode(self) -> str: ...

    def prefill(self, tokens: Any, **options: Unpack[ReadOptions]) -> Any: ...

    def decode(self, header: Any, **options: Unpack[DecodeOptions]) -> Any: ...

    def free(self, *messages: Any) -> None: ...


class SessionFacade(Facade, Protocol):
    """A session, wherever its engine is."""

    @property
    def session(self) -> str: ...

    def reencode(self, message: Any, **options: Unpack[ReadOptions]) -> Message: ...

    def deny(self, *messages: Any) -> SessionFacade: ...

    def evict(self, *messages: Any) -> None: ...

    def pin(self, *messages: Any, ttl: float = ...) -> None: ...

    def unpin(self, *messages: Any) -> None: ...

    def message(self, named: Any) -> Message: ...

    def provenance(self, named: Any) -> frozenset[str]: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...

    def __enter__(self) -> SessionFacade: ...

    def __exit__(self, *raised: Any) -> None: ...


class PendingMessage(Protocol):
    """A submitted call: await it for its message, or name it as a parent before that."""

    id: str

    def __await__(self) -> Any: ...

    def result(self) -> Awaitable[Result]: ...


class AsyncFacade(Protocol):
    """A session whose calls may overlap. See `AsyncChoreography` for what the methods do.

    A complete message is at hand in process, and must be asked for over HTTP: so `message` is a
    coroutine there alone.
    """

    @property
    def mode(self) -> str: ...

    @property
    def session(self) -> str: ...

    async def prefill(self, tokens: Any, **options: Unpack[ReadOptions]) -> Any: ...

    async def decode(self, header: Any, **options: Unpack[DecodeOptions]) -> Any: ...

    async def reencode(self, message: Any, **options: Unpack[ReadOptions]) -> Message: ...

    def deny(self, *messages: Any) -> AsyncFacade: ...

    async def submit(
        self, *, header: Any = None, tokens: Any = None, **options: Unpack[DecodeOptions]
    ) -> PendingMessage: ...

    async def submit_all(self, calls: Sequence[Any]) -> Sequence[PendingMessage]: ...

    def stream_decode(
        self, header: Any, **options: Unpack[DecodeOptions]
    ) -> AsyncIterator[Piece]: ...

    async def free(self, *messages: Any) -> None: ...

    async def evict(self, *messages: Any) -> None: ...

    async def pin(self, *messages: Any, ttl: float = ...) -> None: ...

    async def unpin(self, *messages: Any) -> None: ...

    async def provenance(self, named: Any) -> frozenset[str]: ...

    async def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> AsyncFacade: ...

    async def __aexit__(self, *raised: Any) -> None: ...

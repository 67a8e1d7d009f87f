# SPDX-License-Identifier: Apache-2.0
"""Protocols of the facades, so that one program runs on any of them.

    Facade           Choreography (in any mode), ChoreoClient, FacadeWrapper, benchmarks' Script
    SessionFacade    Choreography (in any mode), ChoreoClient
    AsyncFacade      AsyncChoreography, AsyncChoreoClient

Workflows need a `Facade`. Each class says in its own file which of them it is, and mypy checks it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Unpack, overload

from vllm_choreo.semantics.call import CallSpec, Result
from vllm_choreo.semantics.call_options import (
    Call,
    Calls,
    Content,
    DecodeOptions,
    Named,
    Parent,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message, Piece, Saved


class Facade(Protocol):
    """Maker of messages, with methods as in `Choreography`."""

    @property
    def mode(self) -> str: ...

    @overload
    def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]: ...

    @overload
    def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]: ...

    def free(self, *messages: Named) -> None: ...


class SessionFacade(Facade, Protocol):
    """A session, wherever its engine is."""

    @property
    def session(self) -> str: ...

    def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message: ...

    def deny(self, *messages: Named) -> SessionFacade: ...

    def evict(self, *messages: Named) -> None: ...

    def pin(self, *messages: Named, ttl: float = ...) -> None: ...

    def unpin(self, *messages: Named) -> None: ...

    def message(self, named: Named) -> Message: ...

    def provenance(self, named: Named) -> frozenset[str]: ...

    def save(
        self,
        messages: Sequence[Named] | None,
        uri: str,
        *,
        encodings: bool = ...,
        progress: bool | None = ...,
    ) -> Saved: ...

    def load(
        self, uri: str, *, on_mismatch: str = ..., progress: bool | None = ...
    ) -> list[Message]: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...

    def __enter__(self) -> SessionFacade: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class PendingMessage(Protocol):
    """A submitted call: await it for its message, or name it as a parent before that."""

    id: str

    def __await__(self) -> Generator[Any, None, Message]: ...

    def result(self) -> Awaitable[Result]: ...


class AsyncFacade(Protocol):
    """A session whose calls may overlap, with methods as in `AsyncChoreography`.

    A complete message is at hand in process, and must be asked for over HTTP: so `message` is a
    coroutine there alone.
    """

    @property
    def mode(self) -> str: ...

    @property
    def session(self) -> str: ...

    @overload
    async def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    async def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    async def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]: ...

    @overload
    async def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    async def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    async def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]: ...

    async def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message: ...

    def deny(self, *messages: Named) -> AsyncFacade: ...

    async def submit(
        self,
        *,
        header: Content | None = None,
        tokens: Content | None = None,
        **options: Unpack[DecodeOptions],
    ) -> PendingMessage: ...

    async def submit_all(
        self, calls: Sequence[Call | Mapping[str, Any] | CallSpec]
    ) -> Sequence[PendingMessage]: ...

    def stream_decode(
        self, header: Content, **options: Unpack[DecodeOptions]
    ) -> AsyncGenerator[Piece]: ...

    async def free(self, *messages: Named) -> None: ...

    async def evict(self, *messages: Named) -> None: ...

    async def pin(self, *messages: Named, ttl: float = ...) -> None: ...

    async def unpin(self, *messages: Named) -> None: ...

    async def provenance(self, named: Named) -> frozenset[str]: ...

    async def save(
        self,
        messages: Sequence[Named] | None,
        uri: str,
        *,
        encodings: bool = ...,
        progress: bool | None = ...,
    ) -> Saved: ...

    async def load(
        self, uri: str, *, on_mismatch: str = ..., progress: bool | None = ...
    ) -> list[Message]: ...

    async def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> AsyncFacade: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

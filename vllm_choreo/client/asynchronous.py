# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreoClient`: the methods of `ChoreoClient` as coroutines, calls on pending parents too.

    draft = await c.submit(header="Draft:", parents=[task])
    review = await c.decode("Review:", parents=[task, draft])   # starts when the draft is complete

`submit` returns when the server has accepted the call, so it knows a parent before its child; the
engine starts the child itself, without a round trip.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx

from vllm_choreo.client import exchanges
from vllm_choreo.client.base import ClientBase
from vllm_choreo.client.exchanges import Events, Exchange, Request
from vllm_choreo.client.failures import (
    ServerError,
    closed,
    connection_cut_error,
    content_of,
    no_answer,
)
from vllm_choreo.errors import ChoreoError, EngineRestartedError, UnknownSessionError
from vllm_choreo.semantics.call import (
    Answer,
    Answers,
    Asked,
    CallSpec,
    Result,
    asked,
    asked_copy,
    ended,
    linked_specs,
    one_spec,
    submitted_spec,
)
from vllm_choreo.semantics.call_methods import AsyncCallMethods
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

_T = TypeVar("_T")


class PendingAnswer:
    """A submitted call. `await` it for its `Message`; name it as a parent before that.

    Attributes:
        id: the id that its message will have.
    """

    def __init__(self, message_id: str) -> None:
        self.id = message_id
        self._future: asyncio.Future[Result] = asyncio.Future()

    def __await__(self) -> Generator[Any, None, Message]:
        return self._message().__await__()

    async def _message(self) -> Message:
        result = await self.result()
        if isinstance(result, ChoreoError):
            raise result
        return result

    async def result(self) -> Result:
        """Wait for the call's message, or for its error."""
        # Shielded: that one of several readers gives up does not stop the call for the others.
        return await asyncio.shield(self._future)

    def _settle(self, result: Result) -> None:
        if not self._future.done():
            self._future.set_result(result)


@dataclass
class _Shared:
    """State that a client and its views under a policy share."""

    http: httpx.AsyncClient
    session: str = ""  # until it is open
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class AsyncChoreoClient(AsyncCallMethods, ClientBase):
    """A session on a server, with the methods of `AsyncChoreography`. Arguments: `ChoreoClient`.

    The session is opened by `async with`, by `await client.open()`, or by the first call.
    """

    def _connect(self) -> None:
        self._shared = _Shared(httpx.AsyncClient(**self._endpoint.options()))

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it.

        Raises:
            ChoreoError: it is not open yet.
        """
        if not self._shared.session:
            raise ChoreoError("the session is not open yet: use `async with`, or await open()")
        return self._shared.session

    async def open(self) -> str:
        """Open the session, unless it is open, and return its id.

        Raises:
            ServerError, LimitError: as `ChoreoClient`.
        """
        async with self._shared.lock:
            if not self._shared.session:
                self._shared.session = await self._exchange(self._opening)
        return self._shared.session

    @property
    def prompts(self) -> object:
        """Deprecated: make a `vllm_choreo.pml.AsyncServerPrompts` of the client."""
        return self._prompts("AsyncServerPrompts")

    async def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message:
        """Encode a complete message anew with other parents: `Choreography.reencode`."""
        return await self._run(asked_copy(message, options, self._denied))

    async def submit(
        self,
        *,
        header: Content | None = None,
        tokens: Content | None = None,
        **options: Unpack[DecodeOptions],
    ) -> PendingAnswer:
        """Start one call: a decode of `header`, or a prefill of `tokens`.

        Returns when the server has accepted it; the handle, and its `save_as` name, can be named as
        a parent then. Without `save_as` the client chooses a name.

        Raises:
            ChoreoError: the call is illegal, or a parent has failed by now. Reasons that only the
                engine knows, and parents that fail later, are raised when the handle is awaited.
        """
        (pending,) = await self._submit([submitted_spec(header, tokens, options, self._denied)])
        return pending

    async def submit_all(
        self, calls: Sequence[Call | Mapping[str, Any] | CallSpec]
    ) -> list[PendingAnswer]:
        """Start calls of both kinds in one request, accepted or refused as a whole.

        Otherwise as `AsyncChoreography.submit_all`.

        Raises:
            ChoreoError: one of the calls is illegal; nothing was submitted.
        """
        return await self._submit(linked_specs(calls, self._denied))

    def stream_decode(
        self, header: Content, **options: Unpack[DecodeOptions]
    ) -> AsyncGenerator[Piece]:
        """Generate and yield `Piece`s; the last one carries the message.

        A caller that leaves the loop early ends the call; nothing of it is kept.
        """
        spec = one_spec("decode", header, options, self._denied)
        return self._pieces(lambda session: exchanges.streaming(session, [spec]))

    async def _pieces(self, request: Callable[[str], Request]) -> AsyncGenerator[Piece]:
        start = time.perf_counter()
        stream = await self._stream(request(await self.open()))
        num_chars = num_tokens = 0
        result: Result = connection_cut_error(self._endpoint)
        async with aclosing(self._events(stream)) as events:
            async for event in events:
                if exchanges.is_chunk(event):
                    piece = Piece(event["text"], tuple(event["token_ids"]))
                    num_chars += len(piece.text)
                    num_tokens += len(piece.token_ids)
                    yield piece
                else:
                    result = exchanges.result_of(event, start)
        if isinstance(result, ChoreoError):
            raise result
        yield Piece(
            result.generated_text[num_chars:], result.generated_token_ids[num_tokens:], result
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Ask for the token ids that a message of this text has: `ChoreoClient.tokenize`."""
        return await self._exchange(exchanges.tokenizing(text))

    async def message(self, named: Named) -> Message:
        """Fetch a complete message from the server: `ChoreoClient.message`."""
        return await self._exchange(exchanges.fetching(await self.open(), named))

    async def provenance(self, named: Named) -> frozenset[str]:
        """Ask the server whose traces a message carries: `ChoreoClient.provenance`."""
        return await self._exchange(exchanges.tracing(await self.open(), named))

    async def free(self, *messages: Named) -> None:
        """Free messages: `Choreography.free`."""
        await self._exchange(exchanges.operating(await self.open(), "free", messages))

    async def evict(self, *messages: Named) -> None:
        """Drop cached keys and values: `Choreography.evict`."""
        await self._exchange(exchanges.operating(await self.open(), "evict", messages))

    async def pin(self, *messages: Named, ttl: float | None = None) -> None:
        """Evict messages after all others, for `ttl` seconds: `ChoreoClient.pin`."""
        await self._exchange(exchanges.operating(await self.open(), "pin", messages, ttl))

    async def unpin(self, *messages: Named) -> None:
        """Take pins back: `Choreography.unpin`."""
        await self._exchange(exchanges.operating(await self.open(), "unpin", messages))

    async def save(
        self,
        messages: Sequence[Named] | None,
        uri: str,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Saved:
        """Keep messages on the server: `ChoreoClient.save`."""
        return await self._exchange(exchanges.saving(await self.open(), messages, uri, encodings))

    async def load(
        self, uri: str, *, on_mismatch: str = "refuse", progress: bool | None = None
    ) -> list[Message]:
        """Load messages that the server keeps: `ChoreoClient.load`."""
        return await self._exchange(exchanges.loading(await self.open(), uri, on_mismatch))

    async def delete_saved(self, uri: str) -> None:
        """Delete what was saved under a name: `ChoreoClient.delete_saved`."""
        await self._exchange(exchanges.deleting_saved(uri))

    async def stats(self) -> dict[str, Any]:
        """Ask for the server's numbers on the session: `ChoreoClient.stats`."""
        return await self._exchange(exchanges.stats(await self.open()))

    async def close(self) -> None:
        """End the calls that are running and free all messages: `ChoreoClient.close`."""
        shared = self._shared
        if shared.http.is_closed:
            return
        tasks = list(shared.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if shared.session:
                await self._exchange(exchanges.closing(shared.session))
        except (UnknownSessionError, EngineRestartedError):
            pass  # there is nothing left to free
        finally:
            await shared.http.aclose()

    async def __aenter__(self) -> AsyncChoreoClient:
        await self.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except ServerError:
            # What went wrong first is what the caller must see.
            if exc is None:
                raise

    # -- talking to the server -----------------------------------------------------------------

    async def _called(
        self, kind: str, content: Content | Calls, options: Mapping[str, Any]
    ) -> Answers:
        return await self._run(asked(kind, content, options, self._denied))

    async def _run(self, asked: Asked[Answer]) -> Answer:
        return await self._exchange(exchanges.running(await self.open(), asked))

    async def _exchange(self, exchange: Exchange[_T]) -> _T:
        submitted = time.perf_counter()
        return exchange.read(await self._send(exchange.request), submitted)

    async def _submit(self, specs: Sequence[CallSpec]) -> list[PendingAnswer]:
        specs = [
            replace(spec, save_as=spec.save_as or f"call-{secrets.token_hex(8)}") for spec in specs
        ]
        start = time.perf_counter()
        stream = await self._stream(exchanges.streaming(await self.open(), specs))
        pending = [PendingAnswer(f"{self.session}/{spec.save_as}") for spec in specs]
        task = asyncio.create_task(self._read(stream, pending, start))
        task.add_done_callback(functools.partial(self._finish, pending))
        self._shared.tasks.add(task)
        return pending

    def _finish(self, pending: Sequence[PendingAnswer], task: asyncio.Task[ChoreoError]) -> None:
        """Settle what an answer left open, also that of a reader that never came to run."""
        self._shared.tasks.discard(task)
        rest = ended() if task.cancelled() else task.result()
        for call in pending:
            call._settle(rest)

    async def _send(self, request: Request) -> dict[str, Any]:
        response = await self._answer(request)
        return content_of(self._endpoint, response.status_code, response.content)

    async def _stream(self, request: Request) -> httpx.Response:
        """The answer to calls, to be read as it comes: the server has accepted all of them."""
        response = await self._answer(request, stream=True)
        if not response.is_success:
            body = b"".join([data async for data in self._bytes(response)])
            content_of(self._endpoint, response.status_code, body)  # raises
        return response

    async def _answer(self, request: Request, stream: bool = False) -> httpx.Response:
        http = self._shared.http
        if http.is_closed:
            raise closed(self._shared.session)
        try:
            built = http.build_request(request.method, request.path, content=request.body)
            return await http.send(built, stream=stream)
        except httpx.HTTPError as error:
            raise no_answer(self._endpoint, error) from error

    async def _bytes(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        """The body of an answer; a reader that leaves early closes the connection."""
        try:
            async for data in response.aiter_bytes():
                yield data
        except httpx.HTTPError as error:
            raise no_answer(self._endpoint, error) from error
        finally:
            await response.aclose()

    async def _events(self, response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
        events = Events()
        async with aclosing(self._bytes(response)) as body:
            async for data in body:
                for event in events.feed(data):
                    yield event

    async def _read(
        self, stream: httpx.Response, pending: Sequence[PendingAnswer], start: float
    ) -> ChoreoError:
        """Read the answer of submitted calls; returns what those that it leaves out came to.

        Not left at the last message: the server is to see the end of the request, no disconnect.
        """
        try:
            async with aclosing(self._events(stream)) as events:
                async for event in events:
                    if not exchanges.is_chunk(event):
                        pending[event["index"]]._settle(exchanges.result_of(event, start))
        except ChoreoError as error:
            return error
        return connection_cut_error(self._endpoint)


if TYPE_CHECKING:
    from vllm_choreo.api.protocol import AsyncFacade

    _is_one: type[AsyncFacade] = AsyncChoreoClient

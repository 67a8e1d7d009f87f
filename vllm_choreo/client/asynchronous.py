# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreoClient`: the methods of `ChoreoClient` as coroutines, calls on pending parents too.

    draft = await c.submit(header="Draft:", parents=[task])
    review = await c.decode("Review:", parents=[task, draft])   # starts when the draft is complete

`submit` returns when the server has accepted the call, so it knows a parent before its child; the
engine starts the child itself, without a round trip.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from vllm_choreo.api.choreography import check_mode
from vllm_choreo.api.pending import ended
from vllm_choreo.client import answers, requests
from vllm_choreo.client.answers import Events
from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.client.failures import ServerError, closed, content_of, cut_off, no_answer
from vllm_choreo.client.requests import Request
from vllm_choreo.errors import ChoreoError, EngineRestartedError, UnknownSessionError
from vllm_choreo.semantics.message import Message, Piece


class Pending:
    """A submitted call. `await` it for its `Message`; name it as a parent before that.

    Attributes:
        id: the id that its message will have.
    """

    def __init__(self, message_id: str) -> None:
        self.id = message_id
        self._future: asyncio.Future[Message | ChoreoError] = asyncio.Future()

    def __await__(self) -> Generator[Any, None, Message]:
        return self._message().__await__()

    async def _message(self) -> Message:
        result = await self.result()
        if isinstance(result, ChoreoError):
            raise result
        return result

    async def result(self) -> Message | ChoreoError:
        """What the call comes to: its message, or why there is none."""
        # Shielded: that one of several readers gives up does not stop the call for the others.
        return await asyncio.shield(self._future)

    def _settle(self, result: Message | ChoreoError) -> None:
        if not self._future.done():
            self._future.set_result(result)


@dataclass
class _Shared:
    """What a client and its views under a policy have in common."""

    http: httpx.AsyncClient
    opening: Request
    session: str = ""  # until it is open
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class AsyncChoreoClient:
    """A session on a server, with the methods of `AsyncChoreography`. Arguments: `ChoreoClient`.

    The session is opened by `async with`, by `await client.open()`, or by the first call.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        mode: str = "choreo",
        timeout: float = 600.0,
        ttl_seconds: float | None = None,
    ) -> None:
        check_mode(mode)
        self.mode = mode
        self._endpoint = Endpoint(base_url, api_key, timeout)
        http = httpx.AsyncClient(**self._endpoint.options())
        self._shared = _Shared(http, requests.opening(mode, ttl_seconds))
        self._denied: tuple[str, ...] = ()

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
                self._shared.session = (await self._send(self._shared.opening))["id"]
        return self._shared.session

    async def prefill(self, tokens: Any, **arguments: Any) -> Any:
        """See `Choreography.prefill`.

        Its arguments are `parents`, `offsets`, `new_offset`, `save_as`, `mode` and `deny`.
        """
        requests.check_arguments(arguments, requests.PREFILL_ARGUMENTS)
        return await self._run("prefill", tokens, arguments)

    async def decode(self, header: Any, **arguments: Any) -> Any:
        """See `ChoreoClient.decode`: as for prefill, and `sampling_params`."""
        requests.check_arguments(arguments, requests.DECODE_ARGUMENTS)
        return await self._run("decode", header, arguments)

    async def reencode(self, message: Any, **arguments: Any) -> Message:
        """See `Choreography.reencode`; the message must be complete. Arguments as for prefill."""
        requests.check_arguments(arguments, requests.PREFILL_ARGUMENTS)
        clean: Message = await self._run("prefill", None, {**arguments, "copy_of": message})
        return clean

    def deny(self, *messages: Any) -> AsyncChoreoClient:
        """See `ChoreoClient.deny`; a pending call can be denied, too."""
        view = copy.copy(self)
        view._denied = (*self._denied, *requests.ids_of(messages, "deny"))
        return view

    async def submit(self, *, header: Any = None, tokens: Any = None, **arguments: Any) -> Pending:
        """Start one call: a decode of `header`, or a prefill of `tokens`.

        Returns when the server has accepted it; the handle, and its `save_as` name, can be named as
        a parent then. Without `save_as` the client chooses a name.

        Raises:
            ChoreoError: the call is illegal, or a parent has failed by now. Reasons that only the
                engine knows, and parents that fail later, are raised when the handle is awaited.
        """
        if (header is None) == (tokens is None):
            raise ChoreoError("submit needs either header or tokens", parameter="header")
        requests.check_arguments(arguments, requests.DECODE_ARGUMENTS)
        kind = "prefill" if header is None else "decode"
        call = requests.one_call(
            kind, tokens if header is None else header, arguments, self._denied
        )
        (pending,) = await self._submit([call])
        return pending

    async def submit_all(self, items: Sequence[Any]) -> list[Pending]:
        """See `AsyncChoreography.submit_all`; one request, and one that stands or falls as a whole.

        Raises:
            ChoreoError: one of the calls is illegal; nothing was submitted.
        """
        return await self._submit(requests.each_call(items, self._denied))

    async def stream_decode(self, header: Any, **arguments: Any) -> AsyncIterator[Piece]:
        """Generate and yield `Piece`s; the last one carries the message.

        A caller that leaves the loop early ends the call; nothing of it is kept.
        """
        requests.check_arguments(arguments, requests.DECODE_ARGUMENTS)
        call = requests.one_call("decode", header, arguments, self._denied)
        start = time.perf_counter()
        stream = await self._stream([call])
        num_chars = num_tokens = 0
        result: Message | ChoreoError = cut_off(self._endpoint)
        async with aclosing(self._events(stream)) as events:
            async for event in events:
                if answers.is_chunk(event):
                    piece = Piece(event["text"], tuple(event["token_ids"]))
                    num_chars += len(piece.text)
                    num_tokens += len(piece.token_ids)
                    yield piece
                else:
                    result = answers.result_of(event, start)
        if isinstance(result, ChoreoError):
            raise result
        yield Piece(
            result.generated_text[num_chars:], result.generated_token_ids[num_tokens:], result
        )

    async def message(self, named: Any) -> Message:
        """See `ChoreoClient.message`."""
        body = await self._send(requests.fetching(await self.open(), named))
        return answers.message_of(body, submitted=0.0)

    async def free(self, *messages: Any) -> None:
        """See `Choreography.free`."""
        await self._send_all(requests.freeing(await self.open(), messages))

    async def evict(self, *messages: Any) -> None:
        """See `Choreography.evict`."""
        await self._send_all(requests.evicting(await self.open(), messages))

    async def pin(self, *messages: Any, ttl: float | None = None) -> None:
        """See `ChoreoClient.pin`."""
        await self._send_all(requests.pinning(await self.open(), messages, ttl))

    async def unpin(self, *messages: Any) -> None:
        """See `Choreography.unpin`."""
        await self._send_all(requests.unpinning(await self.open(), messages))

    async def stats(self) -> dict[str, Any]:
        """See `ChoreoClient.stats`."""
        return answers.stats_of(await self._send(requests.reading(await self.open())))

    async def close(self) -> None:
        """End the calls that are running and free all messages; see `ChoreoClient.close`."""
        shared = self._shared
        if shared.http.is_closed:
            return
        tasks = list(shared.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if shared.session:
                await self._send(requests.closing(shared.session))
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

    async def _run(self, kind: str, tokens: Any, arguments: dict[str, Any]) -> Any:
        planned, many = requests.calls_of(kind, tokens, arguments, self._denied)
        session = await self.open()
        start = time.perf_counter()
        body = await self._send(requests.running(session, planned, many))
        return answers.messages_of(body, start) if many else answers.message_of(body, start)

    async def _submit(self, planned: Sequence[dict[str, Any]]) -> list[Pending]:
        for call in planned:
            call.setdefault("save_as", f"call-{secrets.token_hex(8)}")
        start = time.perf_counter()
        stream = await self._stream(planned)
        pending = [Pending(f"{self.session}/{call['save_as']}") for call in planned]
        task = asyncio.create_task(self._read(stream, pending, start))
        task.add_done_callback(functools.partial(self._finish, pending))
        self._shared.tasks.add(task)
        return pending

    def _finish(self, pending: Sequence[Pending], task: asyncio.Task[ChoreoError]) -> None:
        """Settle what an answer left open, also that of a reader that never came to run."""
        self._shared.tasks.discard(task)
        rest = ended() if task.cancelled() else task.result()
        for call in pending:
            call._settle(rest)

    async def _send_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            await self._send(request)

    async def _send(self, request: Request) -> Any:
        response = await self._answer(request)
        return content_of(self._endpoint, response.status_code, response.content)

    async def _stream(self, planned: Sequence[dict[str, Any]]) -> httpx.Response:
        """The answer to calls, to be read as it comes: the server has accepted all of them."""
        response = await self._answer(requests.streaming(await self.open(), planned), stream=True)
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
        self, stream: httpx.Response, pending: Sequence[Pending], start: float
    ) -> ChoreoError:
        """Read the answer of submitted calls; returns what those that it leaves out came to.

        Not left at the last message: the server is to see the end of the request, no disconnect.
        """
        try:
            async with aclosing(self._events(stream)) as events:
                async for event in events:
                    if not answers.is_chunk(event):
                        pending[event["index"]]._settle(answers.result_of(event, start))
        except ChoreoError as error:
            return error
        return cut_off(self._endpoint)

# SPDX-License-Identifier: Apache-2.0
"""HTTP clients for OpenAI's SDK: chats reuse their messages, and the program stays as it is.

    from openai import OpenAI
    from vllm_choreo.integrations.openai_http import ChoreoHttpClient

    client = OpenAI(base_url="http://localhost:8000/v1", http_client=ChoreoHttpClient())

Whatever takes such a client, or is built on the SDK, gains: requests to /chat/completions name as
parents what the session holds, all others pass as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

from vllm_choreo.integrations.conversations import Conversations, HttpRequest, Refused
from vllm_choreo.integrations.exchange import ChatExchange, Listener

if TYPE_CHECKING:
    import httpx

_T = TypeVar("_T")
# The SDK is built on httpx or on its successor, by version: its own clients tell.
_httpx: Any = importlib.import_module(DefaultHttpxClient.__bases__[0].__module__.partition(".")[0])


def transports(socket: str) -> tuple[Any, Any]:
    """Transports to a server's Unix socket, by its path: synchronous and asynchronous."""
    return _httpx.HTTPTransport(uds=socket), _httpx.AsyncHTTPTransport(uds=socket)


class ChoreoHttpClient(DefaultHttpxClient):
    """A `DefaultHttpxClient` of OpenAI's SDK, for a server with the plugin.

    Args:
        conversations: conversations shared with other clients, so that agents read one another's
            messages; None: new ones, in mode "choreo".
        options: further arguments of `openai.DefaultHttpxClient`.
    """

    def __init__(self, conversations: Conversations | None = None, **options: object) -> None:
        super().__init__(**options)
        self.conversations = conversations or Conversations()
        self._last: ChatExchange | None = None

    def send(self, request: httpx.Request, **options: object) -> httpx.Response:
        """Extend the base class: a chat is sent with its parents named."""
        chat = ChatExchange.of(self.conversations, request)
        if chat is None:
            return super().send(request, **options)
        self._last = chat
        response = self._answer(chat, options)
        if chat.is_to_be_repeated(response):
            response = self._answer(chat, options)
        if response.is_closed:
            chat.heard(response)
        else:
            stream = cast("httpx.SyncByteStream", response.stream)
            response.stream = _Heard(stream, Listener(chat, response))
        return response

    def end_session(self) -> None:
        """Close the session, if it was opened here; the next chat opens another."""
        if self._last is not None:
            self._run(self._last, self.conversations.closing())

    def _answer(self, chat: ChatExchange, options: Mapping[str, object]) -> httpx.Response:
        try:
            request = self._run(chat, chat.steps())
        except Refused as refused:
            return chat.refusal(refused)
        response = super().send(request, **options)
        if not response.is_success:
            response.read()
        return response

    def _run(self, chat: ChatExchange, steps: Generator[HttpRequest, Any, _T]) -> _T:
        """Make the requests that `steps` yield, and return what `steps` return.

        Raises:
            Refused: the server has refused what was asked.
        """
        reply: dict[str, Any] | Refused | None = None
        try:
            while True:
                ask = steps.throw(reply) if isinstance(reply, Refused) else steps.send(reply)
                reply = chat.reply(super().send(chat.request(ask)))
        except StopIteration as done:
            return done.value


class ChoreoAsyncHttpClient(DefaultAsyncHttpxClient):
    """The twin of `ChoreoHttpClient` for `AsyncOpenAI`."""

    def __init__(self, conversations: Conversations | None = None, **options: object) -> None:
        super().__init__(**options)
        self.conversations = conversations or Conversations()
        self._last: ChatExchange | None = None

    async def send(self, request: httpx.Request, **options: object) -> httpx.Response:
        """Extend the base class: a chat is sent with its parents named."""
        chat = ChatExchange.of(self.conversations, request)
        if chat is None:
            return await super().send(request, **options)
        self._last = chat
        response = await self._answer(chat, options)
        if chat.is_to_be_repeated(response):
            response = await self._answer(chat, options)
        if response.is_closed:
            chat.heard(response)
        else:
            stream = cast("httpx.AsyncByteStream", response.stream)
            response.stream = _AsyncHeard(stream, Listener(chat, response))
        return response

    async def end_session(self) -> None:
        """Close the session, if it was opened here; the next chat opens another."""
        if self._last is not None:
            await self._run(self._last, self.conversations.closing())

    async def _answer(self, chat: ChatExchange, options: Mapping[str, object]) -> httpx.Response:
        try:
            request = await self._run(chat, chat.steps())
        except Refused as refused:
            return chat.refusal(refused)
        response = await super().send(request, **options)
        if not response.is_success:
            await response.aread()
        return response

    async def _run(self, chat: ChatExchange, steps: Generator[HttpRequest, Any, _T]) -> _T:
        """Make the requests that `steps` yield, as the synchronous twin does."""
        reply: dict[str, Any] | Refused | None = None
        try:
            while True:
                ask = steps.throw(reply) if isinstance(reply, Refused) else steps.send(reply)
                reply = chat.reply(await super().send(chat.request(ask)))
        except StopIteration as done:
            return done.value


class _Heard(_httpx.SyncByteStream):
    """A stream whose bytes are heard as they are read."""

    def __init__(self, stream: httpx.SyncByteStream, listener: Listener) -> None:
        self._stream, self._listener = stream, listener

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield self._listener.hear(chunk)
        self._listener.end()

    def close(self) -> None:
        self._listener.end()
        self._stream.close()


class _AsyncHeard(_httpx.AsyncByteStream):
    """The twin of `_Heard`."""

    def __init__(self, stream: httpx.AsyncByteStream, listener: Listener) -> None:
        self._stream, self._listener = stream, listener

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._listener.hear(chunk)
        self._listener.end()

    async def aclose(self) -> None:
        self._listener.end()
        await self._stream.aclose()

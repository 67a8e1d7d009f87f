# SPDX-License-Identifier: Apache-2.0
"""One request to /chat/completions, and the requests that it becomes: for either HTTP client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm_choreo.integrations.answers import read_answer
from vllm_choreo.integrations.conversations import Asking, Conversations, HttpRequest, Refused

if TYPE_CHECKING:
    import httpx

_CHAT = "/v1/chat/completions"
# Of the request as the SDK made it; those of others are their own.
_OF_THE_BODY = ("content-length", "content-type", "transfer-encoding")


class ChatExchange:
    """A chat request of the SDK, and the requests to the server that it becomes.

    Args:
        conversations: conversations that the chat belongs to.
        request: request of httpx, as the SDK made it.
        body: the request's body, as JSON.
    """

    def __init__(
        self, conversations: Conversations, request: httpx.Request, body: dict[str, Any]
    ) -> None:
        self._conversations = conversations
        self._request = request
        self._body = self._sent = body
        self._is_cut = True
        self._root = request.url.path.removesuffix(_CHAT)

    @classmethod
    def of(cls, conversations: Conversations, request: httpx.Request) -> ChatExchange | None:
        """The exchange of a request; None if it is no chat."""
        if request.method != "POST" or not request.url.path.endswith(_CHAT):
            return None
        return cls(conversations, request, json.loads(request.content))

    def steps(self) -> Asking:
        """Yield the requests to make before the chat; return the request of the chat itself."""
        if not self._conversations.is_ours(self._body):
            return self._request
        self._sent = yield from self._conversations.prepare(self._body, self._is_cut)
        return self.request(HttpRequest("POST", _CHAT, self._sent))

    def reply(self, response: httpx.Response) -> dict[str, Any] | Refused:
        """The JSON of an answer, or a `Refused`."""
        if not response.is_success:
            return Refused(_error(response), response)
        answer: dict[str, Any] = response.json()
        # Of a list whose calls were all legal, one may have failed.
        for item in answer.get("data") or ():
            if item.get("object") == "error":
                return Refused(item["error"], response)
        return answer

    def refusal(self, refused: Refused) -> httpx.Response:
        """The response to a chat of which a part was refused."""
        response = refused.response
        if not response.is_success:
            return response
        # A list was answered, and an item of it says what went wrong.
        status = int(refused.error["code"])
        return type(response)(status, json={"error": refused.error}, request=self._request)

    def is_to_be_repeated(self, response: httpx.Response) -> bool:
        """Return whether the request may be made again, for what it named was not there."""
        if response.is_success:
            return False
        error = _error(response)
        if error.get("type") == "PrefixError" and self._is_cut:
            self._is_cut = False
            return True
        return self._conversations.has_lost(error)

    def heard(self, response: httpx.Response, content: bytes | None = None) -> None:
        """Remember the server's answer; `content`: the bytes of a response that is a stream."""
        if response.is_success:
            answer = read_answer(response.content if content is None else content)
            self._conversations.answered(self._sent, answer)

    def request(self, ask: HttpRequest) -> httpx.Request:
        """The request of httpx for `ask`, with the key and the timeouts of the chat's request."""
        kept = {k: v for k, v in self._request.headers.items() if k.lower() not in _OF_THE_BODY}
        url = self._request.url.copy_with(path=self._root + ask.path, query=None)
        body: dict[str, Any] = {} if ask.body is None else {"json": ask.body}
        extensions = dict(self._request.extensions)
        return type(self._request)(ask.method, url, headers=kept, extensions=extensions, **body)


class Listener:
    """Collector of the bytes of a streamed answer, which hands them over when it ends."""

    def __init__(self, chat: ChatExchange, response: httpx.Response) -> None:
        self._chat, self._response = chat, response
        self._content = bytearray()
        self._has_ended = False

    def hear(self, chunk: bytes) -> bytes:
        """Keep a chunk and return it."""
        self._content += chunk
        return chunk

    def end(self) -> None:
        """Hand the answer over; may be called twice."""
        if not self._has_ended:
            self._has_ended = True
            self._chat.heard(self._response, bytes(self._content))


def _error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, in the form of OpenAI's API; empty: it has another form."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}

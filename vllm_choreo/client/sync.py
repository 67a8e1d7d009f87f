# SPDX-License-Identifier: Apache-2.0
"""`ChoreoClient`: a session on a server. See the package for an example and the differences."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from vllm_choreo.api.choreography import check_mode
from vllm_choreo.client import answers, requests
from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.client.failures import ServerError, closed, content_of, no_answer
from vllm_choreo.client.requests import Request
from vllm_choreo.errors import EngineRestartedError, UnknownSessionError
from vllm_choreo.semantics.message import Message


class ChoreoClient:
    """A session on a server, with the methods of `vllm_choreo.Choreography`.

    Args:
        base_url: of the server, for example "http://127.0.0.1:8000".
        api_key: one of those that the server was started with; None if it asks for none.
        mode: "choreo", "exact" or "baseline", as for `Choreography`.
        timeout: the longest time to wait for an answer, in seconds.
        ttl_seconds: the server closes the session if it is not used for so long; None: the
            server's default, which is also the longest.

    Raises:
        ServerError: no server answers, or it does not choreograph.
        LimitError: the server has as many sessions as it may have.
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
        self._http = httpx.Client(**self._endpoint.options())
        self._denied: tuple[str, ...] = ()
        try:
            self._session: str = self._send(requests.opening(mode, ttl_seconds))["id"]
        except BaseException:
            self._http.close()
            raise

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session

    def prefill(
        self,
        tokens: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Any:
        """See `Choreography.prefill`."""
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        return self._run("prefill", tokens, shared)

    def decode(
        self,
        header: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        sampling_params: Any = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Any:
        """See `Choreography.decode`.

        `sampling_params` are `vllm.SamplingParams`, or a dict of their fields.
        """
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        return self._run("decode", header, {**shared, "sampling_params": sampling_params})

    def reencode(
        self,
        message: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Message:
        """See `Choreography.reencode`."""
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        clean: Message = self._run("prefill", None, {**shared, "copy_of": message})
        return clean

    def deny(self, *messages: Any) -> ChoreoClient:
        """See `Choreography.deny`; that the messages exist is checked with the next call."""
        view = copy.copy(self)
        view._denied = (*self._denied, *requests.ids_of(messages, "deny"))
        return view

    def message(self, named: Any) -> Message:
        """See `Choreography.message`; `metrics.submitted` is 0, for it is not the client's."""
        return answers.message_of(
            self._send(requests.fetching(self._session, named)), submitted=0.0
        )

    def free(self, *messages: Any) -> None:
        """See `Choreography.free`."""
        self._send_all(requests.freeing(self._session, messages))

    def evict(self, *messages: Any) -> None:
        """See `Choreography.evict`."""
        self._send_all(requests.evicting(self._session, messages))

    def pin(self, *messages: Any, ttl: float | None = None) -> None:
        """See `Choreography.pin`; without `ttl`, for as long as the server allows."""
        self._send_all(requests.pinning(self._session, messages, ttl))

    def unpin(self, *messages: Any) -> None:
        """See `Choreography.unpin`."""
        self._send_all(requests.unpinning(self._session, messages))

    def stats(self) -> dict[str, Any]:
        """The server's numbers on the session.

        `messages`, `tokens` and `pinned_messages`, with the limits `max_messages` and `max_tokens`;
        `id`, `mode` and `model`; `created` and `expires_at`, in Unix seconds; and what else the
        server tells.
        """
        return answers.stats_of(self._send(requests.reading(self._session)))

    def close(self) -> None:
        """Free all messages of the session. Closing twice, or after the server did, does nothing.

        Raises:
            ServerError: no server answers. The session ends with its time to live.
        """
        if self._http.is_closed:
            return
        try:
            self._send(requests.closing(self._session))
        except (UnknownSessionError, EngineRestartedError):
            pass  # there is nothing left to free
        finally:
            self._http.close()

    def __enter__(self) -> ChoreoClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ServerError:
            # What went wrong first is what the caller must see.
            if exc is None:
                raise

    # -- talking to the server -----------------------------------------------------------------

    def _run(self, kind: str, tokens: Any, shared: dict[str, Any]) -> Any:
        planned, many = requests.calls_of(kind, tokens, shared, self._denied)
        start = time.perf_counter()
        body = self._send(requests.running(self._session, planned, many))
        return answers.messages_of(body, start) if many else answers.message_of(body, start)

    def _send_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._send(request)

    def _send(self, request: Request) -> Any:
        if self._http.is_closed:
            raise closed(self._session)
        try:
            response = self._http.request(request.method, request.path, content=request.body)
        except httpx.HTTPError as error:
            raise no_answer(self._endpoint, error) from error
        return content_of(self._endpoint, response.status_code, response.content)


def _shared(
    parents: Any, offsets: Any, new_offset: Any, save_as: Any, mode: Any, deny: Any
) -> dict[str, Any]:
    return {
        "parents": parents,
        "offsets": offsets,
        "new_offset": new_offset,
        "save_as": save_as,
        "mode": mode,
        "deny": deny,
    }

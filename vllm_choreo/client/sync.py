# SPDX-License-Identifier: Apache-2.0
"""`ChoreoClient`: a session on a server. See the package for an example and the differences."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx

from vllm_choreo.client import exchanges
from vllm_choreo.client.base import ClientBase
from vllm_choreo.client.exchanges import Exchange, Request
from vllm_choreo.client.failures import ServerError, closed, content_of, no_answer
from vllm_choreo.errors import EngineRestartedError, UnknownSessionError
from vllm_choreo.semantics.call import Answer, Answers, Asked, asked, asked_copy
from vllm_choreo.semantics.call_methods import CallMethods
from vllm_choreo.semantics.call_options import (
    Calls,
    Content,
    Named,
    Parent,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message, Saved

_T = TypeVar("_T")


class ChoreoClient(CallMethods, ClientBase):
    """A session on a server, with the methods of `vllm_choreo.Choreography`.

    `sampling_params` are `vllm.SamplingParams`, or a dict of their fields.

    Args:
        base_url: address of the server, for example "http://127.0.0.1:8000".
        api_key: one of those that the server was started with; None if it asks for none.
        mode: "choreo", "exact" or "baseline", as for `Choreography`.
        timeout: the longest time to wait for an answer, in seconds.
        ttl_seconds: the server closes the session if it is not used for so long; None: the
            server's default, which is also the longest.
        adapter: adapter of calls that name none: a LoRA adapter that the server knows, by its name.
        placement: the calls that use it, as for `Choreography`.
        repair: the rule of calls that name none, as for `Choreography`.

    Raises:
        ServerError: no server answers, or it does not choreograph.
        LimitError: the server has as many sessions as it may have.
    """

    def _connect(self) -> None:
        self._http = httpx.Client(**self._endpoint.options())
        self._session = ""
        try:
            self._session = self._exchange(self._opening)
        except BaseException:
            self._http.close()
            raise

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session

    @property
    def prompts(self) -> object:
        """Deprecated: make a `vllm_choreo.pml.ServerPrompts` of the client."""
        return self._prompts("ServerPrompts")

    def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message:
        """Encode a message anew with other parents: `Choreography.reencode`."""
        return self._run(asked_copy(message, options, self._denied))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ask for the token ids that a message of this text has; no special tokens are added."""
        return self._exchange(exchanges.tokenizing(text))

    def message(self, named: Named) -> Message:
        """Fetch a complete message; its `metrics.submitted` is 0, for it is not the client's."""
        return self._exchange(exchanges.fetching(self._session, named))

    def provenance(self, named: Named) -> frozenset[str]:
        """Ask the server whose traces a message carries: `Choreography.provenance`."""
        return self._exchange(exchanges.tracing(self._session, named))

    def free(self, *messages: Named) -> None:
        """Free messages: `Choreography.free`."""
        self._exchange(exchanges.operating(self._session, "free", messages))

    def evict(self, *messages: Named) -> None:
        """Drop cached keys and values: `Choreography.evict`."""
        self._exchange(exchanges.operating(self._session, "evict", messages))

    def pin(self, *messages: Named, ttl: float | None = None) -> None:
        """Evict messages after all others; without `ttl`, for as long as the server allows."""
        self._exchange(exchanges.operating(self._session, "pin", messages, ttl))

    def unpin(self, *messages: Named) -> None:
        """Take pins back: `Choreography.unpin`."""
        self._exchange(exchanges.operating(self._session, "unpin", messages))

    def save(
        self,
        messages: Sequence[Named] | None,
        uri: str,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Saved:
        """Keep messages on the server; `uri` is a name, for the operator decides where that is.

        Raises:
            ChoreoError: the operator lets nobody save (`--choreo-keep`), or it is no name.
            LimitError: there is no room for it.
        """
        return self._exchange(exchanges.saving(self._session, messages, uri, encodings))

    def load(
        self, uri: str, *, on_mismatch: str = "refuse", progress: bool | None = None
    ) -> list[Message]:
        """Load saved messages: `Choreography.load`; `uri` is the name that was given to `save`."""
        return self._exchange(exchanges.loading(self._session, uri, on_mismatch))

    def delete_saved(self, uri: str) -> None:
        """Delete what was saved under a name; messages that were loaded from it stay.

        Raises:
            UnknownKeptError: nothing is saved under it.
        """
        self._exchange(exchanges.deleting_saved(uri))

    def stats(self) -> dict[str, Any]:
        """The server's numbers on the session.

        `messages`, `tokens` and `pinned_messages`, with the limits `max_messages` and `max_tokens`;
        `id`, `mode` and `model`; `created` and `expires_at`, in Unix seconds; and what else the
        server tells.
        """
        return self._exchange(exchanges.stats(self._session))

    def close(self) -> None:
        """Free all messages of the session. Closing twice, or after the server did, does nothing.

        Raises:
            ServerError: no server answers. The session ends with its time to live.
        """
        if self._http.is_closed:
            return
        try:
            self._exchange(exchanges.closing(self._session))
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

    def _called(self, kind: str, content: Content | Calls, options: Mapping[str, Any]) -> Answers:
        return self._run(asked(kind, content, options, self._denied))

    def _run(self, asked: Asked[Answer]) -> Answer:
        return self._exchange(exchanges.running(self._session, asked))

    def _exchange(self, exchange: Exchange[_T]) -> _T:
        submitted = time.perf_counter()
        return exchange.read(self._send(exchange.request), submitted)

    def _send(self, request: Request) -> dict[str, Any]:
        if self._http.is_closed:
            raise closed(self._session)
        try:
            response = self._http.request(request.method, request.path, content=request.body)
        except httpx.HTTPError as error:
            raise no_answer(self._endpoint, error) from error
        return content_of(self._endpoint, response.status_code, response.content)


if TYPE_CHECKING:
    from vllm_choreo.api.protocol import SessionFacade

    _is_one: type[SessionFacade] = ChoreoClient

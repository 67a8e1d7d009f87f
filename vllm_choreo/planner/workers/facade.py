# SPDX-License-Identifier: Apache-2.0
"""Worker over any facade, in process or over HTTP.

A facade whose methods are coroutines answers calls as they come. One whose methods return when all
calls are done (`Choreography` on a `vllm.LLM`) gets those that wait as one parallel list, wave by
wave.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm_choreo.api.parallel import results_of
from vllm_choreo.api.protocol import AsyncFacade, Facade
from vllm_choreo.errors import ChoreoError, UnknownKeptError
from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.values import PromptTurns
from vllm_choreo.planner.workers.worker import (
    DEFAULT_WIDTH,
    Answer,
    HeldMessage,
    ReadMessage,
    Uri,
    Worker,
)
from vllm_choreo.semantics.message import Message

if TYPE_CHECKING:
    from vllm import SamplingParams

_LOGGER = logging.getLogger(__name__)

AnyFacade = Facade | AsyncFacade

# Moving an answer has a fixed cost, encoding it grows with its tokens. Where they meet is assumed,
# from what saving and loading take beside encoding; it has not been measured for itself.
MIN_MOVED_TOKENS = 64.0
# A call takes a few turns of the event loop from being woken to its next request; a wave waits for
# them, so that those that were woken together go together.
_TURNS_PER_WAVE = 10


@dataclass
class _Asked:
    """A call that waits for its wave."""

    kind: str
    call: dict[str, Any]
    future: asyncio.Future[Message]


class FacadeWorker:
    """A `Worker` over a facade.

    Args:
        facade: `Choreography`, `AsyncChoreography`, a client, or an object with their methods. One
            in mode "baseline" is given text.
        width: calls at a time.
        repair: repair rule of calls that read messages which were encoded apart (docs/repair.md).
        pin_seconds: seconds for which pinned messages stay.
        model: name of the model, on which answers depend; None: the facade's `model`, else that of
            the engine in process. If it is not known, answers cannot be cached.
        turns: texts around a chat's turns; None: those of the facade's model, where it tells.
    """

    def __init__(
        self,
        facade: AnyFacade,
        *,
        width: int = DEFAULT_WIDTH,
        repair: object = None,
        pin_seconds: float = 3600.0,
        model: str | None = None,
        turns: PromptTurns | None = None,
    ) -> None:
        self.width = width
        self.reads_messages = facade.mode != "baseline"
        self.min_moved_tokens = MIN_MOVED_TOKENS if _is_in_process(facade) else float("inf")
        self._facade: Any = facade  # its methods are coroutines, or not
        self._model = model or getattr(facade, "model", None)
        self._turns = turns
        self._repair = repair
        self._pin_seconds = pin_seconds
        self._is_async = inspect.iscoroutinefunction(facade.decode)
        self._waiting: list[_Asked] = []
        self._wave: asyncio.Task[None] | None = None
        self._has_warned = False  # that no tokens are told

    @property
    def identity(self) -> dict[str, str] | None:
        if self._model is not None:
            return {"model": self._model, "repair": str(self._repair or "")}
        found: dict[str, str] | None = getattr(self._facade, "identity", None)
        return found and {**found, "repair": f"{self._repair or ''} {found['repair']}"}

    @property
    def turns(self) -> PromptTurns | None:
        if self._turns is not None:
            return self._turns
        found: PromptTurns | None = getattr(self._facade, "turns", None)
        return found

    async def prefill(self, text: str, parents: Sequence[ReadMessage], exact: bool) -> Message:
        """Encode a message."""
        return await self._ask("prefill", self._call("tokens", text, parents, exact))

    async def decode(
        self, header: str, parents: Sequence[ReadMessage], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer:
        """Generate an answer. Raises ChoreoError: the call is refused."""
        call = self._call("header", header, parents, exact)
        if parents and not exact and self._repair is not None:
            call["repair"] = self._repair
        call["sampling_params"] = self._sampling(sampling)
        return answer_of(await self._ask("decode", call), sampling)

    async def pin(self, messages: Sequence[HeldMessage]) -> None:
        """Pin messages: they are evicted after others."""
        if messages and self.reads_messages and hasattr(self._facade, "pin"):
            done = self._facade.pin(*messages, ttl=self._pin_seconds)
            if self._is_async:
                await done

    async def free(self, messages: Sequence[HeldMessage]) -> None:
        """Free messages."""
        if messages:
            done = self._facade.free(*messages)
            if self._is_async:
                await done

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text; None: they are not known here."""
        tokenize = getattr(self._facade, "tokenize", None)
        if tokenize is None:
            return None
        try:
            found = tokenize(text)
            tokens: tuple[int, ...] = await found if inspect.isawaitable(found) else found
        except ChoreoError as error:  # of a server whose proxy passes on only some paths
            if not self._has_warned:
                _LOGGER.warning("Tokens are not told, so exact plans encode more: %s", error)
            self._has_warned = True
            return None
        return tokens

    async def give(self, message: HeldMessage) -> dict[str, bytes]:
        """Return a message as files, with keys and values; see docs/keep.md."""
        with _memory() as (uri, files):
            done = self._facade.save([message], uri, encodings=True, progress=False)
            if self._is_async:
                await done
            return dict(files())

    async def take(self, given: Mapping[str, bytes]) -> Message:
        """Load a message that another worker gave. Raises ChoreoError: it does not fit here."""
        with _memory(given) as (uri, _):
            done = self._facade.load(uri, progress=False)
            message: Message
            (message,) = await done if self._is_async else done
        return message

    async def save(self, messages: Sequence[HeldMessage], uri: Uri) -> None:
        """Keep messages, with keys and values, in a folder; see docs/keep.md."""
        done = self._facade.save(list(messages), uri, encodings=True, progress=False)
        if self._is_async:
            await done

    async def load(self, uri: Uri) -> list[tuple[tuple[str, ...], HeldMessage]]:
        """Load saved messages; return each behind the texts of its parents and its own.

        The list is empty if none were saved yet.

        Raises:
            KeptError: they are another model's, or damaged; names the file.
            GraphError: some are answers, or have parents that are not among them.
        """
        try:
            done = self._facade.load(uri, progress=False)
            messages: list[Message] = await done if self._is_async else done
        except UnknownKeptError:
            return []
        texts = {message.id: message.text for message in messages}
        if any(m.generated_token_ids or {p.id for p in m.parents} - texts.keys() for m in messages):
            await self.free(messages)
            raise GraphError(
                "what is kept there is not a planner's: give it a folder of its own",
                parameter="kept",
                value=str(uri),
            )
        return [
            ((*(texts[parent.id] for parent in message.parents), message.text), message)
            for message in messages
        ]

    def _call(
        self, key: str, text: str, parents: Sequence[ReadMessage], exact: bool
    ) -> dict[str, Any]:
        call: dict[str, Any] = {key: text}
        if parents:
            call["parents"] = list(parents)
            if exact:
                call["mode"] = "exact"
        return call

    def _sampling(self, fields: Mapping[str, Any]) -> SamplingParams | dict[str, Any]:
        """Return `vllm.SamplingParams` for an engine in process; their fields for all others."""
        if not _is_in_process(self._facade):
            return dict(fields)
        from vllm import SamplingParams

        return SamplingParams(**fields)

    # -- waves ---------------------------------------------------------------------------------

    async def _ask(self, kind: str, call: dict[str, Any]) -> Message:
        if self._is_async:
            content = call.pop("tokens" if kind == "prefill" else "header")
            message: Message = await getattr(self._facade, kind)(content, **call)
            return message
        asked = _Asked(kind, call, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._wave is None:
            self._wave = asyncio.create_task(self._run_wave())
        return await asked.future

    async def _run_wave(self) -> None:
        for _ in range(_TURNS_PER_WAVE):
            await asyncio.sleep(0)
        wave, self._waiting, self._wave = self._waiting, [], None
        for kind in ("prefill", "decode"):
            asked = [one for one in wave if one.kind == kind and not one.future.done()]
            if asked:
                calls, make = [one.call for one in asked], getattr(self._facade, kind)
                for one, result in zip(asked, results_of(make, calls, Exception), strict=True):
                    if one.future.done():  # whoever asked has given up
                        continue
                    if isinstance(result, BaseException):
                        one.future.set_exception(result)
                    else:
                        one.future.set_result(result)


def answer_of(message: Message, sampling: Mapping[str, Any]) -> Answer:
    """Answer that the message of a decode holds."""
    num_out = len(message.generated_token_ids)
    start = message.num_tokens - num_out
    # With stop strings the last token may be part of one, and then the message has been cut.
    ended = message.finish_reason == "stop" and not sampling.get("stop")
    stop = message.num_tokens - (1 if ended else 0)
    readable = stop > start and bool(message.generated_text)
    usage = message.usage
    num_prompt = usage.reused_tokens + usage.encoded_tokens - num_out
    return Answer(
        text=message.generated_text,
        num_out=num_out,
        num_prompt=max(num_prompt, start),
        reused=usage.reused_tokens,
        message=message,
        span=(start, stop) if readable else None,
        token_ids=tuple(message.token_ids[start:stop]),
        exact=usage.exact,
    )


def _is_in_process(facade: object) -> bool:
    """Return whether the facade is in this process: servers choose folders for their clients."""
    from vllm_choreo.api.async_choreography import AsyncChoreography
    from vllm_choreo.api.choreography import Choreography

    return isinstance(facade, (Choreography, AsyncChoreography))


@contextmanager
def _memory(
    kept: Mapping[str, bytes] | None = None,
) -> Iterator[tuple[str, Callable[[], Mapping[str, bytes]]]]:
    """Open a folder in memory with some files: its URI, and a function that returns its files."""
    import fsspec

    store, path = fsspec.filesystem("memory"), f"/choreo-moves/{uuid4().hex}"
    for name, data in (kept or {}).items():
        store.pipe_file(f"{path}/{name}", data)
    try:
        yield (
            f"memory:/{path}",
            lambda: {file.rpartition("/")[2]: store.cat_file(file) for file in store.find(path)},
        )
    finally:
        if store.exists(path):
            store.rm(path, recursive=True)


def as_worker(given: Any) -> Worker:
    """Return a worker over a facade; return a worker itself."""
    if hasattr(given, "reads_messages"):
        worker: Worker = given
        return worker
    return FacadeWorker(given)

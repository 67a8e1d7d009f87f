# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreography`: the methods of `Choreography` as coroutines, on a `vllm` AsyncLLM.

Calls may overlap, and a call may name a parent that is still being generated:

    draft = await c.submit(header="Draft:", parents=[task])
    review = await c.decode("Review:", parents=[task, draft])   # starts when the draft is complete

The engine starts such a call itself, without a round trip through the client. Only in baseline
mode, whose prompts are text, does the client wait for the parent before it submits.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from vllm_choreo.api import baseline
from vllm_choreo.api.choreography import (
    DEFAULT_PIN_SECONDS,
    Report,
    baseline_result,
    check_mode,
    check_ttl,
    checked_answer,
    choreo_result,
    client_stats,
    end_arguments,
    end_report,
    ends_here,
    engine_params,
    engine_prompt,
    raise_first_error,
)
from vllm_choreo.api.pending import Pending, ended
from vllm_choreo.api.session import Session
from vllm_choreo.errors import ChoreoError, ParentFailedError
from vllm_choreo.semantics.message import Call, Message, Outcome, Piece, metrics_of, report_of


class AsyncChoreography:
    """A tenant's session on an AsyncLLM. Arguments and rules are those of `Choreography`.

    Args:
        tenant: to whom the session belongs; identical messages of one tenant are encoded once.
        limits: has `max_messages_per_session` and `max_tokens_per_session`; None: no limits.
    """

    def __init__(
        self, async_llm: Any, mode: str = "choreo", *, tenant: str = "", limits: Any = None
    ) -> None:
        check_mode(mode)
        self.mode = mode
        self._llm = async_llm
        tokenizer, model_config = async_llm.get_tokenizer(), async_llm.model_config
        self._session = Session(tokenizer, model_config, mode, tenant, limits)
        self._entries = self._session.entries
        self._denied: tuple[str, ...] = ()
        self._pending: dict[str, Pending] = {}

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session.id

    async def prefill(self, tokens: Any, **arguments: Any) -> Any:
        """See `Choreography.prefill`.

        Its arguments are `parents`, `offsets`, `new_offset`, `save_as`, `mode` and `deny`.
        """
        _check_arguments(arguments, _PREFILL_ARGUMENTS)
        return await self._run("prefill", tokens, arguments)

    async def decode(self, header: Any, **arguments: Any) -> Any:
        """See `Choreography.decode`: as for prefill, and `sampling_params`."""
        _check_arguments(arguments, _DECODE_ARGUMENTS)
        return await self._run("decode", header, arguments)

    async def reencode(self, message: Any, **arguments: Any) -> Message:
        """See `Choreography.reencode`; the message must be complete. Arguments as for prefill."""
        _check_arguments(arguments, _PREFILL_ARGUMENTS)
        clean: Message = await self._run("prefill", None, {**arguments, "copy_of": message})
        return clean

    def deny(self, *messages: Any) -> AsyncChoreography:
        """See `Choreography.deny`; a pending call can be denied, too."""
        view = copy.copy(self)
        view._denied = (*self._denied, *self._entries.denied(messages))
        return view

    async def submit(self, *, header: Any = None, tokens: Any = None, **arguments: Any) -> Pending:
        """Start one call and return at once: a decode of `header`, or a prefill of `tokens`.

        The handle can be named as a parent at once, and so can its `save_as` name.

        Raises:
            ChoreoError: the call is illegal, or a parent has failed by now. Reasons that only the
                engine knows, and parents that fail later, are raised when the handle is awaited.
        """
        if (header is None) == (tokens is None):
            raise ChoreoError("submit needs either header or tokens", parameter="header")
        kind = "prefill" if header is None else "decode"
        _check_arguments(arguments, _DECODE_ARGUMENTS)
        (call,), _ = self._plan_one(kind, tokens if header is None else header, arguments)
        (pending,) = await self._submit([call])
        return pending

    async def submit_all(self, calls: Sequence[Any]) -> list[Pending]:
        """Start calls of both kinds, of which later ones may name earlier ones, and return at once.

        Args:
            calls: dicts like those of a parallel list, each with one of the keys `header` (a
                decode), `tokens` and `copy_of` (a prefill).

        Raises:
            ChoreoError: one of them is illegal; nothing was submitted.
        """
        return await self._submit(self._session.plan_each(calls, self._denied))

    async def stream_decode(self, header: Any, **arguments: Any) -> AsyncIterator[Piece]:
        """Generate and yield `Piece`s; the last one carries the message.

        A caller that leaves the loop early ends the call; nothing of it is kept.
        """
        _check_arguments(arguments, _DECODE_ARGUMENTS)
        (call,), _ = self._plan_one("decode", header, arguments)
        (pending,) = await self._submit([call])
        try:
            async for piece in pending.pieces():
                yield piece
        finally:
            await self.cancel([pending])

    def begin(self, header: Any, **arguments: Any) -> Pending:
        """Reserve a decode whose request the caller hands to the engine himself.

        The request's parameters must pass through `pending.call.params.apply`, and its last output
        has to be given to `conclude`. Meanwhile the handle can be named as a parent.

        Raises:
            ChoreoError: the call is illegal, or the session is in baseline mode.
        """
        if self.mode == "baseline":
            raise ChoreoError(
                "a session in baseline mode has no choreographed requests; open another one",
                parameter="mode",
                value=self.mode,
            )
        (call,), _ = self._plan_one("decode", header, arguments)
        pending = Pending(call)
        pending._future = asyncio.get_running_loop().create_future()
        self._pending[pending.id] = pending
        return pending

    async def conclude(self, pending: Pending, outcome: Outcome | None) -> Message:
        """Make the message of a request that was run by the caller of `begin`.

        Args:
            outcome: its last output, with all text and tokens; None: it was ended, and nothing of
                it is kept.

        Raises:
            ChoreoError: the engine refused or ended the call.
        """
        call = pending.call
        result: Message | ChoreoError = ended()
        try:
            if outcome is not None:
                result = choreo_result(call, outcome, await self._report(call, outcome))
            elif call.params.open_end:
                await self._utility("end", *end_arguments(call, None))
        finally:
            self._forget([pending], result)
            assert pending._future is not None
            if not pending._future.done():
                pending._future.set_result(result)
        return await pending

    async def cancel(self, pending: Sequence[Pending]) -> None:
        """End calls that are running; nothing of them is kept."""
        futures = [call._future for call in pending if call._future and not call._future.done()]
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        # Calls whose task had not begun to run could not tidy up after themselves.
        unread = [handle for handle in pending if handle.id in self._pending]
        for handle in unread:
            if handle._queue is not None:
                await self._abort(handle.call, handle._queue)
        self._forget(unread, ended())

    async def free(self, *messages: Any) -> None:
        """See `Choreography.free`."""
        ids = self._ids(messages)
        await self._utility("free", self._session.id, ids)
        self._entries.freed(ids)

    async def evict(self, *messages: Any) -> None:
        """See `Choreography.evict`."""
        await self._utility("evict", self._session.id, self._ids(messages))

    async def pin(self, *messages: Any, ttl: float = DEFAULT_PIN_SECONDS) -> None:
        """See `Choreography.pin`."""
        await self._utility("pin", self._session.id, self._ids(messages), check_ttl(ttl))

    async def unpin(self, *messages: Any) -> None:
        """See `Choreography.unpin`."""
        await self._utility("unpin", self._session.id, self._ids(messages))

    def message(self, named: Any) -> Message:
        """See `Choreography.message`."""
        return self._entries.complete("message", named)

    def messages(self) -> list[Message]:
        """All complete messages that are not freed, in the order in which they were named."""
        return list(self._entries.messages().values())

    async def stats(self) -> dict[str, Any]:
        """See `Choreography.stats`."""
        if self.mode == "baseline":
            return client_stats(self._session)
        stats: dict[str, Any] = await self._utility("stats", self._session.id)
        return stats

    async def close(self) -> None:
        """End the calls that are running and free all messages. Closing twice does nothing."""
        if self._entries.close():
            await self.cancel(list(self._pending.values()))
            await self._utility("close", self._session.id)

    async def __aenter__(self) -> AsyncChoreography:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # -- running calls -----------------------------------------------------------------------

    async def _run(self, kind: str, tokens: Any, arguments: dict[str, Any]) -> Any:
        calls, many = self._session.plan(kind, tokens, arguments, self._denied)
        pending = await self._submit(calls)
        try:
            results = await asyncio.gather(*(call.result() for call in pending))
        finally:
            await self.cancel(pending)
        raise_first_error(results)
        return results if many else results[0]

    def _plan_one(
        self, kind: str, tokens: Any, arguments: dict[str, Any]
    ) -> tuple[list[Call], bool]:
        if isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], dict):
            raise ChoreoError("a list of calls needs decode or prefill", parameter="header")
        return self._session.plan(kind, tokens, arguments, self._denied)

    async def _submit(self, calls: Sequence[Call]) -> list[Pending]:
        """Hand calls over to the engine, in their order: a parent always comes before its child."""
        pending = [Pending(call) for call in calls]
        self._pending.update({handle.id: handle for handle in pending})
        for handle in pending:
            start, parents = time.perf_counter(), self._pending_parents(handle.call)
            if self.mode != "baseline":
                try:
                    handle._queue = await self._add(handle.call, handle.call.token_ids)
                except BaseException:
                    await self.cancel(pending)
                    raise
            handle._future = asyncio.create_task(self._life(handle, parents, start))
        return pending

    async def _life(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Message | ChoreoError:
        """The life of one call, up to its message."""
        result: Message | ChoreoError = ended()
        try:
            if self.mode == "baseline":
                result = await self._baseline_result(handle, parents, start)
            else:
                outcome = await self._read(handle, handle._queue, start)
                report = await self._report(handle.call, outcome)
                result = choreo_result(handle.call, outcome, report)
        except ChoreoError as error:
            result = error
        finally:
            self._forget([handle], result)
        return result

    async def _baseline_result(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Message | ChoreoError:
        """The prompt is the text of the parents, once they are complete."""
        for parent in parents:
            if isinstance(await parent.result(), ChoreoError):
                raise ParentFailedError(
                    "the call that makes this parent failed; call it again",
                    parameter="parents",
                    value=parent.id,
                )
        call, messages = handle.call, self._entries.messages()
        if not call.is_decode:
            return baseline.stored_message(call, messages, start)
        handle._queue = await self._add(call, baseline.prompt_token_ids(call, messages))
        return baseline_result(call, await self._read(handle, handle._queue, start))

    def _pending_parents(self, call: Call) -> list[Pending]:
        parents = {span.id: self._pending.get(span.id) for span in call.params.parents}
        return [parent for parent in parents.values() if parent is not None]

    async def _report(self, call: Call, outcome: Outcome) -> Report:
        """What the engine says of a finished call."""
        if not ends_here(call, outcome):
            return report_of(outcome)
        return end_report(await self._utility("end", *end_arguments(call, outcome)))

    async def _add(self, call: Call, prompt: Sequence[int]) -> Any:
        params = engine_params(call, self.mode)
        return await self._llm.add_request(call.id, engine_prompt(prompt), params)

    async def _read(self, handle: Pending, queue: Any, start: float) -> Outcome:
        """Read a request's outputs to the end; a cancelled reader aborts the request."""
        first: float | None = None
        try:
            while True:
                output = queue.get_nowait() or await queue.get()
                now = time.perf_counter()
                first = now if first is None else first
                outcome = Outcome(output, metrics_of(output, start, first, now))
                if output.finished:
                    return outcome
                handle._update(outcome)
        except asyncio.CancelledError:
            await self._abort(handle.call, queue)
            raise
        finally:
            queue.close()

    async def _abort(self, call: Call, queue: Any) -> None:
        await self._llm.abort(queue.request_id, internal=True)
        if call.params.open_end:
            await self._utility("end", *end_arguments(call, None))

    def _forget(self, pending: Sequence[Pending], result: Message | ChoreoError) -> None:
        for handle in pending:
            self._pending.pop(handle.id, None)
            self._entries.finished(handle.call, result)

    def _ids(self, messages: Sequence[Any]) -> list[str]:
        return [self._entries.complete("messages", message).id for message in messages]

    async def _utility(self, operation: str, *args: Any) -> Any:
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call_async

        return checked_answer(await call_async(self._llm, operation, *args))


_PREFILL_ARGUMENTS = ("parents", "offsets", "new_offset", "save_as", "mode", "deny")
_DECODE_ARGUMENTS = (*_PREFILL_ARGUMENTS, "sampling_params")


def _check_arguments(arguments: dict[str, Any], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}; the arguments are {', '.join(known)}")

# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreography`: the methods of `Choreography` as coroutines, on a `vllm` AsyncLLM.

Calls may overlap, and a call may name a parent that is still being generated:

    draft = await c.submit(header="Draft:", parents=[task])
    review = await c.decode("Review:", parents=[task, draft])   # starts when the draft is complete

The engine starts such a call itself, without a round trip through the client. Only where it cannot
(baseline mode, whose prompts are text, and parents with stop strings, whose message is made by the
client) does the client wait for the parent before it submits.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any

from vllm_choreo import baseline
from vllm_choreo.choreography import (
    baseline_result,
    check_mode,
    choreo_result,
    client_stats,
    engine_params,
    engine_prompt,
    is_draft_complete,
    raise_first_error,
    settled_result,
)
from vllm_choreo.errors import ChoreoError, ParentFailedError
from vllm_choreo.message import Call, Message, Outcome, Piece, metrics_of
from vllm_choreo.session import Session


class Pending:
    """A submitted call. `await` it for its `Message`; name it as a parent before that.

    Attributes:
        id: the id that its message will have.
    """

    def __init__(self, call: Call) -> None:
        self.id = call.id
        self._call = call
        # The engine's outputs, if it knows the call by its id: then others can wait for it there.
        self._queue: Any = None
        self._latest: Outcome | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Message | ChoreoError] | None = None

    def __await__(self) -> Generator[Any, None, Message]:
        return self._message().__await__()

    async def _message(self) -> Message:
        result = await self._result()
        if isinstance(result, ChoreoError):
            raise result
        return result

    async def _result(self) -> Message | ChoreoError:
        assert self._task is not None
        try:
            # Shielded: that one of several readers gives up does not stop the call for the others.
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():
                return _ended()
            raise

    def _update(self, outcome: Outcome) -> None:
        self._latest = outcome
        self._changed.set()

    async def _outcomes(self) -> AsyncIterator[Outcome]:
        """What was generated so far, each time that there is more."""
        assert self._task is not None
        self._task.add_done_callback(lambda _: self._changed.set())
        while not self._task.done():
            await self._changed.wait()
            self._changed.clear()
            if self._latest is not None:
                yield self._latest


class AsyncChoreography:
    """A tenant's session on an AsyncLLM. Arguments and rules are those of `Choreography`."""

    def __init__(self, async_llm: Any, mode: str = "choreo") -> None:
        check_mode(mode)
        self.mode = mode
        self._llm = async_llm
        self._session = Session(async_llm.get_tokenizer(), async_llm.model_config, mode)
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
        view._denied = (*self._denied, *self._session.denied(messages))
        return view

    async def submit(self, *, header: Any = None, tokens: Any = None, **arguments: Any) -> Pending:
        """Start one call and return at once: a decode of `header`, or a prefill of `tokens`.

        The handle can be named as a parent at once, and so can its `save_as` name.

        Raises:
            ChoreoError: the call is illegal. Reasons that only the engine knows are raised when
                the handle is awaited.
        """
        if (header is None) == (tokens is None):
            raise ChoreoError("submit needs either header or tokens", parameter="header")
        kind = "prefill" if header is None else "decode"
        _check_arguments(arguments, _DECODE_ARGUMENTS)
        (call,), _ = self._plan_one(kind, tokens if header is None else header, arguments)
        (pending,) = await self._submit([call])
        return pending

    async def stream_decode(self, header: Any, **arguments: Any) -> AsyncIterator[Piece]:
        """Generate and yield `Piece`s; the last one carries the message.

        A caller that leaves the loop early ends the call; nothing of it is kept.
        """
        _check_arguments(arguments, _DECODE_ARGUMENTS)
        (call,), _ = self._plan_one("decode", header, arguments)
        (pending,) = await self._submit([call])
        num_chars = num_tokens = 0
        try:
            async for outcome in pending._outcomes():
                completion = outcome.output.outputs[0]
                text, token_ids = completion.text[num_chars:], completion.token_ids[num_tokens:]
                if text or token_ids:
                    num_chars, num_tokens = len(completion.text), len(completion.token_ids)
                    yield Piece(text, tuple(token_ids))
            message = await pending
            yield Piece(
                message.generated_text[num_chars:],
                message.generated_token_ids[num_tokens:],
                message,
            )
        finally:
            await self._cancel([pending])

    async def free(self, *messages: Any) -> None:
        """See `Choreography.free`."""
        ids = self._session.live_ids(messages)
        await self._utility("free", self._session.id, ids)
        self._session.freed(ids)

    async def evict(self, *messages: Any) -> None:
        """See `Choreography.evict`."""
        await self._utility("evict", self._session.id, self._session.live_ids(messages))

    async def stats(self) -> dict[str, Any]:
        """See `Choreography.stats`."""
        if self.mode == "baseline":
            return client_stats(self._session)
        stats: dict[str, Any] = await self._utility("stats", self._session.id)
        return stats

    async def close(self) -> None:
        """End the calls that are running and free all messages. Closing twice does nothing."""
        if self._session.close():
            await self._cancel(list(self._pending.values()))
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
            results = await asyncio.gather(*(call._result() for call in pending))
        finally:
            await self._cancel(pending)
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
        waits = {call.id: self._parents_to_wait_for(call) for call in calls}
        self._pending.update({handle.id: handle for handle in pending})
        for handle, call in zip(pending, calls, strict=True):
            start = time.perf_counter()
            if self.mode != "baseline" and not waits[call.id] and not call.has_stop_strings:
                try:
                    handle._queue = await self._add(call, call.token_ids)
                except BaseException:
                    await self._cancel(pending)
                    raise
            handle._task = asyncio.create_task(self._complete(handle, waits[call.id], start))
        return pending

    def _parents_to_wait_for(self, call: Call) -> list[Pending]:
        parents = {span.id: self._pending.get(span.id) for span in call.params.parents}
        return [
            parent for parent in parents.values() if parent is not None and parent._queue is None
        ]

    async def _complete(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Message | ChoreoError:
        """The life of one call, from its parents to its message."""
        result: Message | ChoreoError = _ended()
        try:
            for parent in parents:
                if isinstance(await parent._result(), ChoreoError):
                    raise ParentFailedError(
                        "the call that makes this parent failed; call it again",
                        parameter="parents",
                        value=parent.id,
                    )
            result = await self._result(handle, start)
        except ChoreoError as error:
            result = error
        finally:
            self._forget([handle], result)
        return result

    async def _result(self, handle: Pending, start: float) -> Message | ChoreoError:
        call = handle._call
        if self.mode == "baseline":
            messages = self._session.messages()
            if not call.is_decode:
                return baseline.stored_message(call, messages, start)
            prompt = baseline.prompt_token_ids(call, messages)
            return baseline_result(call, await self._outcome(handle, call, prompt, start))
        if handle._queue is not None:
            return choreo_result(call, await self._read(handle, handle._queue, start))
        if not call.has_stop_strings:
            return choreo_result(call, await self._outcome(handle, call, call.token_ids, start))
        return await self._settled(handle, call, start)

    async def _settled(self, handle: Pending, call: Call, start: float) -> Message | ChoreoError:
        """Generate a draft, then encode the message from it: see `Call.has_stop_strings`."""
        draft = call.draft()
        outcome = await self._outcome(handle, draft, call.token_ids, start)
        if not is_draft_complete(outcome):
            return choreo_result(draft, outcome)
        whole = call.settled(outcome.output.outputs[0].token_ids)
        end = await self._outcome(None, whole, whole.token_ids, start)
        await self._utility("free", self._session.id, [draft.id])
        return settled_result(call, outcome, end)

    async def _outcome(
        self, handle: Pending | None, call: Call, prompt: Sequence[int], start: float
    ) -> Outcome:
        return await self._read(handle, await self._add(call, prompt), start)

    async def _add(self, call: Call, prompt: Sequence[int]) -> Any:
        params = engine_params(call, self.mode)
        return await self._llm.add_request(call.id, engine_prompt(prompt), params)

    async def _read(self, handle: Pending | None, queue: Any, start: float) -> Outcome:
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
                if handle is not None:
                    handle._update(outcome)
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()

    def _forget(self, pending: Sequence[Pending], result: Message | ChoreoError) -> None:
        for handle in pending:
            self._pending.pop(handle.id, None)
            self._session.finished(handle._call, result)

    async def _cancel(self, pending: Sequence[Pending]) -> None:
        tasks = [handle._task for handle in pending if handle._task and not handle._task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Calls whose task had not begun to run could not tidy up after themselves.
        unread = [handle for handle in pending if handle.id in self._pending]
        for handle in unread:
            if handle._queue is not None:
                await self._llm.abort(handle._queue.request_id, internal=True)
        self._forget(unread, _ended())

    async def _utility(self, operation: str, *args: Any) -> Any:
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call_async

        return await call_async(self._llm, operation, *args)


def _ended() -> ChoreoError:
    return ChoreoError("the call was ended before it was complete")


_PREFILL_ARGUMENTS = ("parents", "offsets", "new_offset", "save_as", "mode", "deny")
_DECODE_ARGUMENTS = (*_PREFILL_ARGUMENTS, "sampling_params")


def _check_arguments(arguments: dict[str, Any], known: Sequence[str]) -> None:
    for name in arguments:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}; the arguments are {', '.join(known)}")

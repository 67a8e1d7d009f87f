# SPDX-License-Identifier: Apache-2.0
"""`AsyncRunner`: planned calls on an AsyncLLM, from their submission to their messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_choreo.api import baseline
from vllm_choreo.api.outcomes import (
    Outcome,
    Report,
    baseline_result,
    call_prompt,
    checked_answer,
    choreo_result,
    end_arguments,
    end_report,
    ends_here,
    engine_params,
    metrics_of,
    report_of,
)
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.session import Session
from vllm_choreo.errors import ChoreoError, ParentFailedError
from vllm_choreo.semantics.call import Result, ended

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.api.picture_prompts import Prompt


class AsyncRunner:
    """The calls of one session that are running.

    Args:
        async_llm: vLLM's AsyncLLM.
        session: session of the calls; it records the result of each.
    """

    def __init__(self, async_llm: AsyncLLM, session: Session) -> None:
        self.mode = session.mode
        self._llm = async_llm
        self._entries = session.entries
        # Text goes through vLLM's prefix cache; messages never do.
        self._salt = (session.tenant or None) if session.mode == "baseline" else None
        self._pending: dict[str, Pending] = {}

    async def submit(self, calls: Sequence[PlannedCall]) -> list[Pending]:
        """Hand calls over to the engine, in their order: a parent always comes before its child."""
        pending = [Pending(call) for call in calls]
        self._pending.update({handle.id: handle for handle in pending})
        for handle in pending:
            start, parents = time.perf_counter(), self._pending_parents(handle.call)
            if self.mode != "baseline":
                try:
                    await self._hand_over(handle)
                except BaseException:
                    await self.cancel(pending)
                    raise
            handle._future = asyncio.create_task(self._life(handle, parents, start))
        return pending

    async def results(self, pending: Sequence[Pending]) -> list[Result]:
        """Wait for the results of calls; a caller that gives up before ends them."""
        try:
            return await asyncio.gather(*(call.result() for call in pending))
        finally:
            await self.cancel(pending)

    def reserve(self, call: PlannedCall) -> Pending:
        """Return the handle of a call that somebody else runs: then `submitted` and `conclude`."""
        pending = Pending(call)
        pending._future = asyncio.get_running_loop().create_future()
        self._pending[pending.id] = pending
        return pending

    async def place(self, pending: Pending) -> int | None:
        """Choose the engine of a reserved call: `AsyncChoreography.place`."""
        return None

    async def submitted(self, pending: Pending, queue: OutputQueue) -> None:
        """Record that the engine has a reserved call: `AsyncChoreography.submitted`."""
        pending._queue = queue
        if pending.id not in self._pending:  # it was ended meanwhile
            await self._abort(pending.call, queue)

    async def conclude(self, pending: Pending, outcome: Outcome) -> None:
        """Settle a reserved call: `AsyncChoreography.conclude`."""
        call = pending.call
        result: Result = ended()
        try:
            result = choreo_result(call, outcome, await self._report(call, outcome))
        finally:
            self._forget([pending], result)
            assert pending._future is not None
            if not pending._future.done():
                pending._future.set_result(result)

    def engine_of(self, message_id: str) -> int | None:
        """Number of the engine on which the call of a message ran; None: there is one engine."""
        return None

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

    async def cancel_all(self) -> None:
        """End all calls that are running."""
        await self.cancel(list(self._pending.values()))

    async def utility(self, operation: str, *args: object) -> Any:
        """Run an operation of the engine. Raises ChoreoError: it is refused."""
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call_async

        return checked_answer(await call_async(self._llm, operation, *args))

    def one_engine(self, ids: Sequence[str]) -> AbstractAsyncContextManager[None]:
        """Have one engine do what a save or a load asks, and know these messages meanwhile."""
        return nullcontext()

    async def of_workers(self, method: str, *args: object) -> list[Any]:
        """Run a method of the engine's workers; one answer each."""
        from vllm_choreo.engine.utility import of_workers_async

        return await of_workers_async(self._llm, method, *args)

    # -- one call ---------------------------------------------------------------------------------

    async def _life(self, handle: Pending, parents: Sequence[Pending], start: float) -> Result:
        """Run one call up to its message."""
        result: Result = ended()
        try:
            if self.mode == "baseline":
                result = await self._baseline_result(handle, parents, start)
            else:
                result = await self._choreo_result(handle, parents, start)
        except ChoreoError as error:
            result = error
        finally:
            self._forget([handle], result)
        return result

    async def _hand_over(self, handle: Pending) -> None:
        """Hand a submitted call to the engine, before those that may name it."""
        handle._queue = await self._add(handle.call, call_prompt(handle.call))

    async def _choreo_result(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Result:
        """Run a call that was handed over up to its message; the engine waits for its parents."""
        assert handle._queue is not None
        outcome = await self._read(handle, handle._queue, start)
        return choreo_result(handle.call, outcome, await self._report(handle.call, outcome))

    async def _baseline_result(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Result:
        """Run a call on the text of its parents, once they are complete."""
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
        handle._queue = await self._add(call, baseline.prompt_of(call, self._entries, self._salt))
        return baseline_result(call, await self._read(handle, handle._queue, start))

    def _pending_parents(self, call: PlannedCall) -> list[Pending]:
        parents = {span.id: self._pending.get(span.id) for span in call.params.parents}
        return [parent for parent in parents.values() if parent is not None]

    async def _report(self, call: PlannedCall, outcome: Outcome) -> Report:
        """The engine's report on a finished call."""
        if not ends_here(call, outcome):
            return report_of(outcome)
        return end_report(await self.utility("end", *end_arguments(call, outcome)))

    async def _add(
        self, call: PlannedCall, prompt: Prompt, engine: int | None = None
    ) -> OutputQueue:
        params = engine_params(call, self.mode)
        queue: OutputQueue = await self._llm.add_request(
            call.id,
            prompt,
            params,
            lora_request=call.adapter,
            data_parallel_rank=engine,
        )
        return queue

    async def _read(self, handle: Pending, queue: OutputQueue, start: float) -> Outcome:
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

    async def _abort(self, call: PlannedCall, queue: OutputQueue) -> None:
        await self._llm.abort(queue.request_id, internal=True)
        if call.params.open_end:
            await self.utility("end", *end_arguments(call, None), queue.request_id)

    def _forget(self, pending: Sequence[Pending], result: Result) -> None:
        for handle in pending:
            self._pending.pop(handle.id, None)
            self._entries.finished(handle.call, result)

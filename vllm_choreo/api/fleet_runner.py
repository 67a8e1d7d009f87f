# SPDX-License-Identifier: Apache-2.0
"""`FleetRunner`: the calls of one session on several engines.

The session's recipes are here, in front of the engines. A call is placed when the tokens of its
parents are known: at once, where they are given, else when they are generated. Those that its
engine does not know are made there again, by the calls that made them, from their tokens; for those
that it is making the engine waits. When an engine ends, its calls are placed and run again: the
answers of greedy ones, and of all of which nothing was seen yet, are what they would have been.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.async_runner import AsyncRunner
from vllm_choreo.api.fleet import Fleet, GivenMessage
from vllm_choreo.api.fleet_calls import (
    Known,
    Running,
    begun_or_over,
    last_output,
    may_run_again,
    reading_call,
    until_complete,
)
from vllm_choreo.api.fleet_engines import SessionEngines
from vllm_choreo.api.fleet_moves import Holder
from vllm_choreo.api.fleet_snapshots import SNAPSHOT_ENGINE, SnapshotEngine
from vllm_choreo.api.one_engine import ask_workers
from vllm_choreo.api.outcomes import Outcome, call_prompt, choreo_result, report_of
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe, named_by, recipe_of
from vllm_choreo.api.session import Session
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.repair.rules import ByAttention
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# A call that so many engines did not survive is not made again: it may be what ends them.
_MAX_ENDS = 3
_MIN_MEASURED = 32  # tokens: fewer take what a step takes
# What an engine that was started again says of messages that the one before it had.
_NOT_THERE = (UnknownMessageError, FreedMessageError)


class FleetRunner(AsyncRunner):
    """The running calls and the recipes of one session.

    Args:
        fleet: the engines, and what all sessions know of them.
    """

    def __init__(self, async_llm: AsyncLLM, session: Session, fleet: Fleet) -> None:
        super().__init__(async_llm, session)
        self._fleet = fleet
        self._engines = SessionEngines(async_llm, fleet, session.id)
        self._recipes: dict[str, CallRecipe] = {}
        self._named: dict[str, dict[str, CallRecipe]] = {}  # by running call: what it names
        self._running: dict[str, Running] = {}
        self._begun: dict[str, asyncio.Event] = {}  # by running call: set while an engine has it
        self._ran_on: dict[str, int] = {}  # by message: the engine of its call
        self._restoring: dict[tuple[int, int, str], asyncio.Task[None]] = {}
        # The engine of the call that was placed last; by engine: new tokens of calls placed there.
        self._near: int | None = None
        self._num_placed = Counter[int]()
        self._pinned: dict[str, float] = {}  # until when, on the clock of the event loop

    # -- one call --------------------------------------------------------------------------------

    async def _hand_over(self, handle: Pending) -> None:
        """Check a call. It is handed to an engine when the tokens of its parents are known."""
        self._check(handle)

    def reserve(self, call: PlannedCall) -> Pending:
        pending = super().reserve(call)
        self._check(pending)
        return pending

    def _check(self, handle: Pending) -> None:
        """Refuse a call that could not be made again; note the recipes that it names."""
        if isinstance(handle.call.params.repair, ByAttention):
            raise UnsupportedOptionError(
                "what a call attends to is measured when it runs, and its message could not be "
                "made again in another engine: give a rule such as 'first:32', or use one engine",
                parameter="repair",
                value="attention",
            )
        if handle.call.prompt is not None and self._fleet.journal is not None:
            raise UnsupportedOptionError(
                "a cluster's journal keeps no pictures so far: leave them out, or use engines of "
                "one server (--data-parallel-size)",
                parameter="multi_modal_data",
                value="given",
            )
        self._begun[handle.id] = asyncio.Event()
        names = named_by(handle.call)
        self._named[handle.id] = {n: self._recipes[n] for n in names if n in self._recipes}

    async def _choreo_result(
        self, handle: Pending, parents: Sequence[Pending], start: float
    ) -> Result:
        """Run a call up to its message; again, where its engine ends."""
        num_ends = 0
        while num_ends < _MAX_ENDS:
            running = await self._placed(handle, parents)
            result = await self._run_on(running, handle, start)
            has_ended = self._fleet.life(running.engine) != running.known.life
            is_lost = isinstance(result, EngineRestartedError) or (
                has_ended and isinstance(result, _NOT_THERE)
            )
            if not is_lost:
                return result
            num_ends += running.has_begun
            if not may_run_again(handle):
                return EngineRestartedError(
                    "the engine of this answer has ended, and another one cannot go on with what "
                    "was sampled: call it again",
                    parameter="sampling_params",
                    value="a temperature above 0 and no seed",
                )
        return EngineRestartedError(
            f"{_MAX_ENDS} engines have ended with this call: it is not made again",
            parameter="call",
            value=handle.id,
        )

    async def _placed(self, handle: Pending, parents: Sequence[Pending]) -> Running:
        """Place a call when the tokens of its parents are known.

        Raises:
            ParentFailedError, FreedMessageError: they never will be.
        """
        named, coming = self._named[handle.id], dict[Hashable, int]()
        for parent in parents:
            making = await self._making(parent)
            if making is None or making.makes is None:
                await until_complete(parent)
                continue
            named[parent.id] = making.makes
            coming[making.makes.key] = making.engine
        for name in named_by(handle.call):
            recipe = named.get(name) or self._recipes.get(name)
            if recipe is None:
                raise FreedMessageError(
                    "the message was freed before the call could read it; free messages after "
                    "their last use",
                    parameter="parents",
                    value=name,
                )
            named[name] = recipe
        await self._fleet.until_alive()
        recipes = [named[name] for name in named_by(handle.call)]
        one = SNAPSHOT_ENGINE.get()  # a call that a save makes is of the save's engine
        only = None if one is None else one.number
        num_new = len(handle.call.token_ids)
        makes = self._made_by(handle.call, named)
        given = None if makes is None else self._given(makes)
        placed = self._fleet.place(recipes, num_new, only, given, coming)
        self._near = placed.engine
        self._num_placed[placed.engine] += num_new
        running = Running(placed, self._engines.known(placed.engine), recipes, makes)
        self._running[handle.id] = running
        return running

    async def _making(self, parent: Pending) -> Running | None:
        """Wait until an engine has a call whose message is given.

        Returns:
            The call on its engine; None: the message is complete, failed, or is generated.
        """
        begun = self._begun.get(parent.id)
        if begun is None or parent._future is None or parent.call.params.kind != "prefill":
            return None
        await begun_or_over(begun, parent._future)
        return self._running.get(parent.id) if begun.is_set() else None

    def _made_by(self, call: PlannedCall, named: Mapping[str, CallRecipe]) -> CallRecipe | None:
        """Recipe of the message that a call makes, if all of its tokens are given."""
        if call.params.kind != "prefill":
            return None
        return recipe_of(self._fleet.pictures.share(call), call.token_ids, named)

    def _given(self, makes: CallRecipe) -> GivenMessage:
        near = self._near
        return GivenMessage(makes.key, near, 0 if near is None else self._num_placed[near])

    async def _run_on(self, running: Running, handle: Pending, start: float) -> Result:
        """Run a call on the engine where it was placed."""
        call = handle.call
        try:
            await self._prepare(running.engine, running.known, running.recipes)
            try:
                handle._queue = await self._add_to(running.engine, running.known, call)
                running.has_begun = True
                self._begun[handle.id].set()
                outcome = await self._read(handle, handle._queue, start)
                return choreo_result(call, outcome, await self._report(call, outcome))
            finally:
                await self._release(running.engine, running.known, running.recipes)
        except ChoreoError as error:
            return error
        finally:
            if handle.id in self._begun:
                self._begun[handle.id].clear()
            self._fleet.on_done(running.placed, running.known.life)

    async def _add_to(self, engine: int, known: Known, call: PlannedCall) -> OutputQueue:
        """Hand a call to an engine, in this life of it and no other."""
        self._fleet.expect(call.id, engine, known.life)
        try:
            return await self._add(call, call_prompt(call), engine)
        finally:
            self._fleet.expect_no_more(call.id, engine)

    def _forget(self, pending: Sequence[Pending], result: Result) -> None:
        for handle in pending:
            running = self._running.pop(handle.id, None)
            named = self._named.pop(handle.id, {})
            self._begun.pop(handle.id, None)
            if running is not None:
                self._fleet.expect_no_more(handle.id, running.engine)
            if running is not None and isinstance(result, Message):
                self._measure(result)
                call = self._fleet.pictures.share(handle.call)
                recipe = running.makes or recipe_of(call, result.token_ids, named)
                self._recipes[recipe.id] = recipe
                self._ran_on[recipe.id] = running.engine
                if self._fleet.journal is not None:
                    self._fleet.journal.made(self._engines.session, recipe, result)
                self._engines.enter(running.engine, running.known, recipe)
        super()._forget(pending, result)

    def _measure(self, message: Message) -> None:
        """Take in how long a prefill took; of an answer, most of the time is something else."""
        if message.generated_token_ids:
            return
        times, num_encoded = message.metrics, message.usage.encoded_tokens
        if num_encoded >= _MIN_MEASURED:
            seconds = times.latency - (times.waiting or 0.0)
            self._fleet.measured.on_encoded(num_encoded, seconds)

    # -- calls whose requests somebody else hands over ---------------------------------------------

    async def place(self, pending: Pending) -> int:
        """Choose the engine of a reserved call, and make what it reads known there."""
        parents = self._pending_parents(pending.call)
        while True:
            running = await self._placed(pending, parents)
            try:
                await self._prepare(running.engine, running.known, running.recipes)
            except EngineRestartedError:  # before it had the call: another one may
                self._fleet.on_done(running.placed, running.known.life)
                del self._running[pending.id]
                continue
            self._fleet.expect(pending.id, running.engine, running.known.life)
            return running.engine

    async def submitted(self, pending: Pending, queue: OutputQueue) -> None:
        if pending.id in self._begun:
            self._begun[pending.id].set()
        await super().submitted(pending, queue)

    async def conclude(self, pending: Pending, outcome: Outcome) -> None:
        running = self._running.get(pending.id)
        try:
            await super().conclude(pending, outcome)
        finally:
            await self._leave(running)

    async def cancel(self, pending: Sequence[Pending]) -> None:
        reserved = [self._running.get(handle.id) for handle in pending if not handle.is_task]
        await super().cancel(pending)
        for running in reserved:
            await self._leave(running)

    async def _leave(self, running: Running | None) -> None:
        """End what `place` began."""
        if running is not None:
            self._fleet.on_done(running.placed, running.known.life)
            await self._release(running.engine, running.known, running.recipes)

    def engine_of(self, message_id: str) -> int | None:
        return self._ran_on.get(message_id)

    # -- messages that an engine does not know -----------------------------------------------------

    async def _prepare(self, engine: int, known: Known, recipes: Sequence[CallRecipe]) -> None:
        """Have an engine know messages, and keep them there until `_release`.

        Raises:
            EngineRestartedError: this life of the engine has ended.
            ChoreoError: one could not be made there.
        """
        for recipe in recipes:
            known.holds[recipe.id] += 1
        try:
            await asyncio.gather(*(self._have(engine, known, recipe) for recipe in recipes))
        except BaseException:
            await self._release(engine, known, recipes)
            raise

    async def _release(self, engine: int, known: Known, recipes: Sequence[CallRecipe]) -> None:
        """Take back what `_prepare` holds; what was freed meanwhile is freed there."""
        known.holds.subtract(recipe.id for recipe in recipes)
        for recipe in recipes:
            if known.holds[recipe.id] <= 0:
                del known.holds[recipe.id]
        gone = [recipe.id for recipe in recipes if recipe.id not in self._recipes]
        await self._engines.free_on(engine, known, gone)

    async def _have(self, engine: int, known: Known, recipe: CallRecipe) -> None:
        """Have an engine know a message; those who ask at a time wait for one encoding."""
        parent = self._pending.get(recipe.id)
        if parent is not None:
            making = await self._making(parent)
            if making is not None and making.engine == engine and making.known is known:
                return  # whoever reads it waits there
            await until_complete(parent)
        key = (engine, known.life, recipe.id)
        task = self._restoring.get(key)
        if task is None:
            if recipe.id in known.ids:
                # If it was evicted, it comes back.
                return self._engines.enter(engine, known, recipe)
            task = asyncio.create_task(self._restore(engine, known, recipe))
            self._restoring[key] = task
            task.add_done_callback(lambda done: self._restored(key, done))
        await asyncio.shield(task)

    def _restored(self, key: tuple[int, int, str], task: asyncio.Task[None]) -> None:
        del self._restoring[key]
        if not task.cancelled():
            task.exception()  # those who wait are told

    async def _restore(self, engine: int, known: Known, recipe: CallRecipe) -> None:
        """Make a message in an engine that does not know it, behind those that it was made behind.

        Raises:
            EngineRestartedError: this life of the engine has ended.
            ChoreoError: it cannot be made there.
        """
        await self._prepare(engine, known, recipe.parents)
        try:
            complete = partial(self._complete, recipe.call.params.tenant)
            async with self._fleet.moved(recipe, engine, complete) or nullcontext():
                queue = await self._add_to(engine, known, recipe.call)
                report = report_of(await last_output(queue))
            if isinstance(report, ChoreoError):
                raise report
            if report["encoded_tokens"] >= recipe.num_tokens:  # nothing of it was there
                self._fleet.on_encoded_again(engine, recipe)
            self._engines.enter(engine, known, recipe)
            await self._pin_again(engine, recipe.id)
        finally:
            await self._release(engine, known, recipe.parents)

    async def _complete(self, tenant: str, holder: Holder) -> None:
        """Have an engine encode what a message lacks there, by a call that reads it.

        The last token of an answer is encoded after the answer has gone out.
        """
        call = reading_call(holder.session, tenant, holder.message_id)
        queue = await self._add_to(holder.engine, self._engines.known(holder.engine), call)
        report = report_of(await last_output(queue))
        if isinstance(report, ChoreoError):
            raise report
        await self._engines.ask(holder.engine, "free", holder.session, [call.id])

    # -- operations of engines ---------------------------------------------------------------------

    async def utility(self, operation: str, *args: object) -> object:
        """Run an operation in the engines that it concerns. Raises ChoreoError: it is refused."""
        match operation, *args:
            case "end", _, str(message_id), *_:
                running = self._running.get(message_id)
                return running and await self._engines.ask(running.engine, operation, *args)
            case "free", _, list(ids):
                await self._free(ids)
            case "evict", _, list(ids):
                await self._evict(ids)
            case "pin", _, list(ids), float(ttl):
                await self._pin(ids, ttl)
            case "unpin", _, list(ids):
                await self._unpin(ids)
            case (("stats" | "counts"), *_):
                return await self._engines.stats(operation)
            case _ if operation.startswith("snapshot_"):
                return await self._ask_snapshot(operation, *args)
            case "close", *_:
                await self._close()
            case _:
                raise AssertionError(f"sessions of several engines do not ask for {operation}")
        return None

    @asynccontextmanager
    async def one_engine(self, ids: Sequence[str]) -> AsyncIterator[None]:
        """Have a save or a load go through one engine, which knows these messages."""
        await self._fleet.until_alive()
        recipes = [self._recipes[message_id] for message_id in ids]
        placed = self._fleet.place(recipes, 0)
        known = self._engines.known(placed.engine)
        try:
            one = SnapshotEngine(placed.engine, self._fleet.one(placed.engine))
            await self._prepare(placed.engine, known, recipes)
            token = SNAPSHOT_ENGINE.set(one)
            try:
                yield
            finally:
                SNAPSHOT_ENGINE.reset(token)
                await self._release(placed.engine, known, recipes)
        finally:
            self._fleet.on_done(placed, known.life)

    async def of_workers(self, method: str, *args: object) -> list[Any]:
        one = SNAPSHOT_ENGINE.get()
        assert one is not None, "only saves and loads ask workers, and have an engine"
        return await ask_workers(one.one, method, *args)

    async def _ask_snapshot(self, operation: str, *args: object) -> object:
        """Run an operation of a save or a load in its engine; note what was loaded."""
        one = SNAPSHOT_ENGINE.get()
        assert one is not None, "saves and loads have an engine"
        answer = await one.ask(operation, *args)
        if operation == "snapshot_commit":
            known, (ticket,) = self._engines.known(one.number), args
            assert isinstance(ticket, int)
            for recipe, has_data in one.loading.pop(ticket):
                self._recipes[recipe.id] = recipe
                known.ids[recipe.id] = recipe.key
                if has_data:
                    self._engines.enter(one.number, known, recipe)
        return answer

    def restore(self, recipes: Iterable[CallRecipe]) -> None:
        """Take in messages that no engine has: whoever reads one has it made again."""
        self._recipes.update({recipe.id: recipe for recipe in recipes})

    async def _free(self, ids: Sequence[str]) -> None:
        if self._fleet.journal is not None:
            self._fleet.journal.freed(self._engines.session, ids)
        for message_id in ids:
            self._recipes.pop(message_id, None)
            self._ran_on.pop(message_id, None)
            self._pinned.pop(message_id, None)
        for engine in self._fleet.alive:
            await self._engines.free_on(engine, self._engines.known(engine), ids)

    async def _evict(self, ids: Sequence[str]) -> None:
        await self._engines.ask_those_that_know(ids, "evict")
        for message_id in ids:
            self._fleet.homes.remove(self._recipes[message_id].key)

    async def _pin(self, ids: Sequence[str], ttl: float) -> None:
        """Pin messages where they are; one that no engine knows is made again in one."""
        self._fleet.homes.pin([self._recipes[message_id].key for message_id in ids])
        until = asyncio.get_running_loop().time() + ttl
        self._pinned.update(dict.fromkeys(ids, until))
        await self._engines.ask_those_that_know(ids, "pin", ttl)
        for message_id in self._engines.unknown(ids):
            await self._fleet.until_alive()
            recipe = self._recipes[message_id]
            placed = self._fleet.place([recipe], 0)
            known = self._engines.known(placed.engine)
            await self._have(placed.engine, known, recipe)
            self._fleet.on_done(placed, known.life)

    async def _pin_again(self, engine: int, message_id: str) -> None:
        ttl = self._pinned.get(message_id, 0.0) - asyncio.get_running_loop().time()
        if ttl > 0:
            await self._engines.ask(engine, "pin", self._engines.session, [message_id], ttl)

    async def _unpin(self, ids: Sequence[str]) -> None:
        self._fleet.homes.unpin([self._recipes[message_id].key for message_id in ids])
        for message_id in ids:
            self._pinned.pop(message_id, None)
        await self._engines.ask_those_that_know(ids, "unpin")

    async def _close(self) -> None:
        self._recipes.clear()
        self._ran_on.clear()
        self._pinned.clear()
        await self._engines.close()

# SPDX-License-Identifier: Apache-2.0
"""`FleetRunner`: the calls of one session on several engines.

The session's recipes are here, in front of the engines. A call is placed when its parents are
complete; those that its engine does not know are made there again, by the calls that made them,
from their tokens. When an engine ends, its calls are placed and run again: the answers of greedy
ones, and of all of which nothing was seen yet, are what they would have been.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.async_runner import AsyncRunner
from vllm_choreo.api.fleet import Fleet, added_stats
from vllm_choreo.api.outcomes import Outcome, checked_answer, choreo_result, metrics_of, report_of
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe, named_by, recipe_of
from vllm_choreo.api.session import Session
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    ParentFailedError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.fleet.placement import Placement
from vllm_choreo.repair.rules import ByAttention
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# A call that so many engines did not survive is not made again: it may be what ends them.
_MAX_ENDS = 3
# What an engine that was started again says of messages that the one before it had.
_NOT_THERE = (UnknownMessageError, FreedMessageError)


@dataclass
class _Known:
    """Messages of a session that one life of an engine has.

    Attributes:
        life: number of the life.
        ids: messages that the engine knows.
        holds: running calls that need a message, by its id: it is not freed there meanwhile.
    """

    life: int
    ids: set[str] = field(default_factory=set)
    holds: Counter[str] = field(default_factory=Counter)


@dataclass
class _Running:
    """A call on an engine.

    Attributes:
        placed: the engine, and the work that the call adds there.
        known: messages of the session that this life of the engine has.
        recipes: messages that the call names.
        has_begun: True if the engine was handed the call.
    """

    placed: Placement
    known: _Known
    recipes: Sequence[CallRecipe]
    has_begun: bool = False

    @property
    def engine(self) -> int:
        return self.placed.engine


class FleetRunner(AsyncRunner):
    """The running calls and the recipes of one session.

    Args:
        fleet: the engines, and what all sessions know of them.
    """

    def __init__(self, async_llm: AsyncLLM, session: Session, fleet: Fleet) -> None:
        super().__init__(async_llm, session)
        self._session_id = session.id
        self._fleet = fleet
        self._recipes: dict[str, CallRecipe] = {}
        self._named: dict[str, dict[str, CallRecipe]] = {}  # by running call: what it names
        self._running: dict[str, _Running] = {}
        self._known: dict[int, _Known] = {}
        self._restoring: dict[tuple[int, int, str], asyncio.Task[None]] = {}
        self._pinned: dict[str, float] = {}  # until when, on the clock of the event loop

    # -- one call --------------------------------------------------------------------------------

    async def _hand_over(self, handle: Pending) -> None:
        """Check a call. It is handed to an engine when its parents are complete."""
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
            if not _may_run_again(handle):
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

    async def _placed(self, handle: Pending, parents: Sequence[Pending]) -> _Running:
        """Place a call whose parents are complete.

        Raises:
            ParentFailedError, FreedMessageError: one is not.
        """
        named = self._named[handle.id]
        for parent in parents:
            if isinstance(await parent.result(), ChoreoError):
                raise ParentFailedError(
                    "the parent was never completed: the call that makes it failed; call it again",
                    parameter="parents",
                    value=parent.id,
                )
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
        placed = self._fleet.place(recipes, len(handle.call.token_ids))
        running = _Running(placed, self._on(placed.engine), recipes)
        self._running[handle.id] = running
        return running

    def _on(self, engine: int) -> _Known:
        """Messages of the session that an engine has, as it runs now."""
        life, known = self._fleet.life(engine), self._known.get(engine)
        if known is None or known.life != life:
            known = self._known[engine] = _Known(life)
        return known

    async def _run_on(self, running: _Running, handle: Pending, start: float) -> Result:
        """Run a call on the engine where it was placed."""
        call = handle.call
        try:
            await self._prepare(running.engine, running.known, running.recipes)
            try:
                handle._queue = await self._add_to(running.engine, running.known, call)
                running.has_begun = True
                outcome = await self._read(handle, handle._queue, start)
                return choreo_result(call, outcome, await self._report(call, outcome))
            finally:
                await self._release(running.engine, running.known, running.recipes)
        except ChoreoError as error:
            return error
        finally:
            self._fleet.on_done(running.placed, running.known.life)

    async def _add_to(self, engine: int, known: _Known, call: PlannedCall) -> OutputQueue:
        """Hand a call to an engine, in this life of it and no other."""
        self._fleet.expect(call.id, known.life)
        return await self._add(call, call.token_ids, engine)

    def _forget(self, pending: Sequence[Pending], result: Result) -> None:
        for handle in pending:
            running = self._running.pop(handle.id, None)
            named = self._named.pop(handle.id, {})
            if running is not None and isinstance(result, Message):
                recipe = recipe_of(handle.call, result, named)
                self._recipes[recipe.id] = recipe
                if self._fleet.journal is not None:
                    self._fleet.journal.made(self._session_id, recipe, result)
                self._enter(running.engine, running.known, recipe)
        super()._forget(pending, result)

    def _enter(self, engine: int, known: _Known, recipe: CallRecipe) -> None:
        """Enter a message that an engine has made, if it has not ended since."""
        if self._fleet.life(engine) == known.life:
            known.ids.add(recipe.id)
            self._fleet.enter(engine, recipe)

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
            self._fleet.expect(pending.id, running.known.life)
            return running.engine

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

    async def _leave(self, running: _Running | None) -> None:
        """End what `place` began."""
        if running is not None:
            self._fleet.on_done(running.placed, running.known.life)
            await self._release(running.engine, running.known, running.recipes)

    # -- messages that an engine does not know -----------------------------------------------------

    async def _prepare(self, engine: int, known: _Known, recipes: Sequence[CallRecipe]) -> None:
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

    async def _release(self, engine: int, known: _Known, recipes: Sequence[CallRecipe]) -> None:
        """Take back what `_prepare` holds; what was freed meanwhile is freed there."""
        known.holds.subtract(recipe.id for recipe in recipes)
        for recipe in recipes:
            if known.holds[recipe.id] <= 0:
                del known.holds[recipe.id]
        gone = [recipe.id for recipe in recipes if recipe.id not in self._recipes]
        await self._free_on(engine, known, gone)

    async def _have(self, engine: int, known: _Known, recipe: CallRecipe) -> None:
        """Have an engine know a message; those who ask at a time wait for one encoding."""
        key = (engine, known.life, recipe.id)
        task = self._restoring.get(key)
        if task is None:
            if recipe.id in known.ids:
                return
            task = asyncio.create_task(self._restore(engine, known, recipe))
            self._restoring[key] = task
            task.add_done_callback(lambda done: self._restored(key, done))
        await asyncio.shield(task)

    def _restored(self, key: tuple[int, int, str], task: asyncio.Task[None]) -> None:
        del self._restoring[key]
        if not task.cancelled():
            task.exception()  # those who wait are told

    async def _restore(self, engine: int, known: _Known, recipe: CallRecipe) -> None:
        """Make a message in an engine that does not know it, behind those that it was made behind.

        Raises:
            EngineRestartedError: this life of the engine has ended.
            ChoreoError: it cannot be made there.
        """
        await self._prepare(engine, known, recipe.parents)
        try:
            queue = await self._add_to(engine, known, recipe.call)
            report = report_of(await _last_output(queue))
            if isinstance(report, ChoreoError):
                raise report
            self._enter(engine, known, recipe)
            await self._pin_again(engine, recipe.id)
        finally:
            await self._release(engine, known, recipe.parents)

    # -- operations of engines ---------------------------------------------------------------------

    async def utility(self, operation: str, *args: object) -> object:
        """Run an operation in the engines that it concerns. Raises ChoreoError: it is refused."""
        match operation, *args:
            case "end", _, str(message_id), *_:
                running = self._running.get(message_id)
                return running and await self._ask(running.engine, operation, *args)
            case "free", _, list(ids):
                await self._free(ids)
            case "evict", _, list(ids):
                await self._evict(ids)
            case "pin", _, list(ids), float(ttl):
                await self._pin(ids, ttl)
            case "unpin", _, list(ids):
                await self._unpin(ids)
            case (("stats" | "counts"), *_):
                return await self._stats(operation)
            case "close", *_:
                await self._close()
            case _:
                raise AssertionError(f"sessions of several engines do not ask for {operation}")
        return None

    async def _ask(self, engine: int, operation: str, *args: object) -> object:
        """Run an operation in one engine.

        Raises:
            EngineRestartedError: it has ended.
            ChoreoError: the operation is refused.
        """
        from vllm_choreo.engine.utility import call_engine

        return checked_answer(await call_engine(self._llm, engine, operation, *args))

    async def _ask_knowing(self, operation: str, ids: Iterable[str], *args: object) -> None:
        """Run an operation on messages, in each engine that knows some of them."""
        for engine in self._fleet.alive:
            known = [message_id for message_id in ids if message_id in self._on(engine).ids]
            if known:
                try:
                    await self._ask(engine, operation, self._session_id, known, *args)
                except EngineRestartedError:
                    continue  # with all that it had

    def restore(self, recipes: Iterable[CallRecipe]) -> None:
        """Take in messages that no engine has: whoever reads one has it made again."""
        self._recipes.update({recipe.id: recipe for recipe in recipes})

    async def _free(self, ids: Sequence[str]) -> None:
        if self._fleet.journal is not None:
            self._fleet.journal.freed(self._session_id, ids)
        for message_id in ids:
            self._recipes.pop(message_id, None)
            self._pinned.pop(message_id, None)
        for engine in self._fleet.alive:
            await self._free_on(engine, self._on(engine), ids)

    async def _free_on(self, engine: int, known: _Known, ids: Iterable[str]) -> None:
        """Free messages in an engine, but for those that a call there still needs."""
        gone = [name for name in ids if name in known.ids and known.holds[name] <= 0]
        known.ids.difference_update(gone)
        if gone and self._fleet.life(engine) == known.life:
            try:
                await self._ask(engine, "free", self._session_id, gone)
            except EngineRestartedError:
                return

    async def _evict(self, ids: Sequence[str]) -> None:
        await self._ask_knowing("evict", ids)
        for message_id in ids:
            self._fleet.homes.remove(self._recipes[message_id].key)

    async def _pin(self, ids: Sequence[str], ttl: float) -> None:
        """Pin messages where they are; one that no engine knows is made again in one."""
        self._fleet.homes.pin([self._recipes[message_id].key for message_id in ids])
        until = asyncio.get_running_loop().time() + ttl
        self._pinned.update(dict.fromkeys(ids, until))
        await self._ask_knowing("pin", ids, ttl)
        there = set[str]().union(*(self._on(engine).ids for engine in self._fleet.alive))
        for message_id in set(ids) - there:
            await self._fleet.until_alive()
            recipe = self._recipes[message_id]
            placed = self._fleet.place([recipe], 0)
            known = self._on(placed.engine)
            await self._have(placed.engine, known, recipe)
            self._fleet.on_done(placed, known.life)

    async def _pin_again(self, engine: int, message_id: str) -> None:
        ttl = self._pinned.get(message_id, 0.0) - asyncio.get_running_loop().time()
        if ttl > 0:
            await self._ask(engine, "pin", self._session_id, [message_id], ttl)

    async def _unpin(self, ids: Sequence[str]) -> None:
        self._fleet.homes.unpin([self._recipes[message_id].key for message_id in ids])
        for message_id in ids:
            self._pinned.pop(message_id, None)
        await self._ask_knowing("unpin", ids)

    async def _stats(self, operation: str) -> dict[str, Any]:
        answers: dict[int, Mapping[str, Any]] = {}
        while not answers:
            await self._fleet.until_alive()
            for engine in self._fleet.alive:
                try:
                    answer = await self._ask(engine, operation, self._session_id)
                except EngineRestartedError:
                    continue
                assert isinstance(answer, Mapping)
                answers[engine] = answer
        return added_stats(answers)

    async def _close(self) -> None:
        self._recipes.clear()
        self._pinned.clear()
        self._known.clear()
        for engine in self._fleet.alive:
            try:
                await self._ask(engine, "close", self._session_id)
            except EngineRestartedError:
                continue


async def _last_output(queue: OutputQueue) -> Outcome:
    """The last output of a request that nobody watches."""
    try:
        while True:
            output = queue.get_nowait() or await queue.get()
            if output.finished:
                return Outcome(output, metrics_of(output, 0.0, 0.0, 0.0))
    finally:
        queue.close()


def _may_run_again(handle: Pending) -> bool:
    """Return whether a call run again gives what was seen of it, as far as that goes."""
    params = handle.call.sampling_params
    if params is None or params.temperature == 0 or params.seed is not None:
        return True
    return handle._latest is None or not handle._latest.output.outputs[0].token_ids

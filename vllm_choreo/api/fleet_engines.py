# SPDX-License-Identifier: Apache-2.0
"""`SessionEngines`: the engines of a fleet, as one session has them.

What an engine knows of the session, it knows in one of its lives; operations go to those that know
what they are about, and an engine that ends meanwhile has nothing left to be told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.fleet import Fleet, added_stats
from vllm_choreo.api.fleet_calls import Known
from vllm_choreo.api.outcomes import checked_answer
from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.errors import EngineRestartedError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class SessionEngines:
    """Messages of one session in the engines, and operations on them there.

    Args:
        async_llm: AsyncLLM of the engines.
        fleet: the engines, and what all sessions know of them.
        session: id of the session.

    Attributes:
        session: id of the session.
    """

    def __init__(self, async_llm: AsyncLLM, fleet: Fleet, session: str) -> None:
        self.session = session
        self._llm = async_llm
        self._fleet = fleet
        self._known: dict[int, Known] = {}

    def known(self, engine: int) -> Known:
        """Messages of the session that an engine has, as it runs now."""
        life, known = self._fleet.life(engine), self._known.get(engine)
        if known is None or known.life != life:
            known = self._known[engine] = Known(life)
        return known

    def unknown(self, ids: Iterable[str]) -> set[str]:
        """Names of messages that no engine has."""
        return set(ids).difference(*(self.known(engine).ids for engine in self._fleet.alive))

    def enter(self, engine: int, known: Known, recipe: CallRecipe) -> None:
        """Enter a message that an engine has made, if it has not ended since."""
        if self._fleet.life(engine) == known.life:
            known.ids[recipe.id] = recipe.key
            self._fleet.enter(engine, recipe)

    async def ask(self, engine: int, operation: str, *args: object) -> object:
        """Run an operation in one engine.

        Raises:
            EngineRestartedError: it has ended.
            ChoreoError: the operation is refused.
        """
        from vllm_choreo.engine.utility import call_engine

        return checked_answer(await call_engine(self._llm, engine, operation, *args))

    async def ask_those_that_know(self, ids: Iterable[str], operation: str, *args: object) -> None:
        """Run an operation on messages, in each engine that knows some of them."""
        for engine in self._fleet.alive:
            known = [message_id for message_id in ids if message_id in self.known(engine).ids]
            if known:
                try:
                    await self.ask(engine, operation, self.session, known, *args)
                except EngineRestartedError:
                    continue  # with all that it had

    async def free_on(self, engine: int, known: Known, ids: Iterable[str]) -> None:
        """Free messages in an engine, but for those that a call there still needs."""
        gone = [name for name in ids if name in known.ids and known.holds[name] <= 0]
        is_there = self._fleet.life(engine) == known.life
        for name in gone:
            key = known.ids.pop(name)
            if is_there:
                self._fleet.leave(engine, key, name)
        if gone and is_there:
            try:
                await self.ask(engine, "free", self.session, gone)
            except EngineRestartedError:
                return

    async def stats(self, operation: str) -> dict[str, Any]:
        """Answers of all engines to "stats" or "counts", as one.

        Raises:
            EngineRestartedError: none will run again.
        """
        answers: dict[int, Mapping[str, Any]] = {}
        while not answers:
            await self._fleet.until_alive()
            for engine in self._fleet.alive:
                try:
                    answer = await self.ask(engine, operation, self.session)
                except EngineRestartedError:
                    continue
                assert isinstance(answer, Mapping)
                answers[engine] = answer
        return added_stats(answers)

    async def close(self) -> None:
        """Have the engines forget the session."""
        for engine, known in self._known.items():
            if self._fleet.life(engine) == known.life:
                for message_id, key in known.ids.items():
                    self._fleet.leave(engine, key, message_id)
        self._known.clear()
        for engine in self._fleet.alive:
            try:
                await self.ask(engine, "close", self.session)
            except EngineRestartedError:
                continue

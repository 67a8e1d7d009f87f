# SPDX-License-Identifier: Apache-2.0
"""`Fleet`: what an AsyncLLM of several engines has where, as its sessions have told.

Sessions live in front of the engines (`fleet_runner.py`): an engine knows the messages that were
made in it, or were needed there. The fleet is what all sessions of an AsyncLLM share: it places
their calls, and forgets what an engine had when that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.api.restored import SessionJournal
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.errors import EngineRestartedError, UnsupportedOptionError
from vllm_choreo.fleet.homes import Homes
from vllm_choreo.fleet.loads import Loads
from vllm_choreo.fleet.placement import Placement, Rates, candidates_of, place

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.engine.fleet_client import FleetClient

# Seconds a token, until it has been measured: of a small model on a CPU.
_FIRST_RATE = 1e-3
_NEWEST = 0.1  # weight of a measurement
_ENDED = float("inf")

_FLEETS: WeakKeyDictionary[FleetClient, Fleet] = WeakKeyDictionary()


def fleet_of(async_llm: AsyncLLM) -> Fleet | None:
    """The fleet of an AsyncLLM, the same one for all of its sessions; None: it has one engine."""
    from vllm_choreo.engine.utility import fleet_client_of

    client = fleet_client_of(async_llm)
    if client is None:
        return None
    if client not in _FLEETS:
        _FLEETS[client] = Fleet(async_llm, client)
    return _FLEETS[client]


class Fleet:
    """Engines of one AsyncLLM: which messages they know, what lies there, and what waits there.

    Attributes:
        homes: encodings by engine, as far as the front can tell.
        loads: estimated seconds of work by engine; infinite while one starts again.
        encode_rate: measured seconds that an engine takes for a token.
        journal: journal of what sessions make and free; None: they end with this process.
    """

    def __init__(self, async_llm: AsyncLLM, client: FleetClient) -> None:
        config = async_llm.vllm_config
        settings, cache = ChoreoConfig.from_vllm(config), config.cache_config
        count = client.num_engines
        capacity = cache.num_gpu_blocks * cache.block_size // count
        self.homes = Homes(
            [capacity] * count,
            tenant_share=settings.tenant_share,
            pinned_share=settings.pinned_share,
        )
        self.loads = Loads(count)
        self.encode_rate = _FIRST_RATE
        self.journal: SessionJournal | None = None
        self._turn = 0
        self._starts = client.starts
        self._resources = client.resources
        self._lives = client.lives
        self._changed = asyncio.Event()
        for engine in set(range(count)) - set(client.alive):
            self.on_end(engine)
        client.watcher = self

    # -- what happens to engines -----------------------------------------------------------------

    def on_end(self, engine: int) -> None:
        """Forget what an engine had, and place no calls there."""
        self.homes.remove_engine(engine)
        self.loads.put(engine, _ENDED)

    def on_start(self, engine: int) -> None:
        """Place calls on an engine that runs again."""
        self.loads.put(engine, 0.0)
        self._changed.set()

    def life(self, engine: int) -> int:
        """Number of an engine's life: another one, once it has ended."""
        return self._starts[engine] if self.is_alive(engine) else -1

    def expect(self, message_id: str, life: int) -> None:
        """Let the request that makes a message reach its engine in this life of it alone."""
        self._lives[message_id] = life

    def is_alive(self, engine: int) -> bool:
        """Return whether an engine runs, and takes calls."""
        return self.loads.queue[engine] != _ENDED

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that run."""
        return [engine for engine in range(len(self.loads.queue)) if self.is_alive(engine)]

    async def until_alive(self) -> None:
        """Wait until an engine runs.

        Raises:
            EngineRestartedError: none will.
        """
        while not self.alive:
            if self._resources.engine_dead:
                raise EngineRestartedError(
                    "all engines have ended, and do not start again: start the server again",
                    parameter="engine",
                )
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 1.0)
            except TimeoutError:
                continue

    # -- placement -------------------------------------------------------------------------------

    def place(self, recipes: Sequence[CallRecipe], num_new: int) -> Placement:
        """Choose the engine of a call, one that runs, and count its work there.

        Args:
            recipes: messages that the call reads.
            num_new: tokens of the call itself.
        """
        self._turn += 1
        reads = [self.homes.read(recipe.key, recipe.num_tokens) for recipe in recipes]
        rates = Rates(encode=self.encode_rate)
        candidates = [
            engine
            for engine in candidates_of(reads, self.loads, self._turn)
            if self.is_alive(engine)
        ]
        found = place(reads, self.encode_rate * num_new, candidates, self.loads.queue, rates)
        self.loads.add(found.engine, found.cost)
        return found

    def on_done(self, placed: Placement, life: int) -> None:
        """Take a call's work off its engine, if that has not ended since."""
        if self.life(placed.engine) == life:
            self.loads.add(placed.engine, -placed.cost)

    def enter(self, engine: int, recipe: CallRecipe) -> None:
        """Enter an encoding that an engine has."""
        tenant = recipe.call.params.tenant
        self.homes.add(recipe.key, engine, recipe.num_tokens, tenant)

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Take in how long encoding took."""
        if num_tokens > 0 and seconds > 0:
            self.encode_rate += _NEWEST * (seconds / num_tokens - self.encode_rate)


def added_stats(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of engines to "stats" or "counts" as one; each message names its `engine`."""
    from vllm_choreo.engine.utility import added

    total = added(list(answers.values()))
    if "messages" in total:
        total["messages"] = [
            {**message, "engine": engine}
            for engine, answer in answers.items()
            for message in answer["messages"]
        ]
    return total


def refuse_snapshots() -> None:
    """Refuse to save or load messages.

    Raises:
        UnsupportedOptionError: always; what an engine has written is that engine's alone.
    """
    raise UnsupportedOptionError(
        "messages of several engines are neither saved nor loaded yet: use one engine "
        "(--data-parallel-size 1)",
        parameter="data_parallel_size",
        value="above 1",
    )

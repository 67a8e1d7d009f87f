# SPDX-License-Identifier: Apache-2.0
"""`Fleet`: what an AsyncLLM of several engines has where, as its sessions have told.

Sessions live in front of the engines (`fleet_runner.py`): an engine knows the messages that were
made in it, or were needed there. The fleet is what all sessions of an AsyncLLM share: it places
their calls, and forgets what an engine had when that ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

from vllm_choreo.api.fleet_moves import Complete, Holder, MoveCounts, Mover
from vllm_choreo.api.fleet_transfer import (
    FolderTransfer,
    MoveFiles,
    Transfer,
    exchange_folder,
)
from vllm_choreo.api.one_engine import OneEngine
from vllm_choreo.api.recipes import CallRecipe, SharedPictures
from vllm_choreo.api.restored import SessionJournal
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.errors import EngineRestartedError
from vllm_choreo.fleet.homes import Homes
from vllm_choreo.fleet.loads import Loads
from vllm_choreo.fleet.measured import MeasuredRates
from vllm_choreo.fleet.placement import (
    Near,
    Placement,
    Rates,
    Read,
    candidates_of,
    place,
    source_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.engine.fleet_client import FleetClient

_ENDED = float("inf")
# Tokens that other engines may be ahead by before what a session is given goes there.
_MAX_APART = 2048
_NOTHING: Mapping[Hashable, int] = {}

_FLEETS: WeakKeyDictionary[FleetClient, Fleet] = WeakKeyDictionary()


class GivenMessage(NamedTuple):
    """A message whose tokens are known before a call encodes them.

    Attributes:
        key: name of its encoding; where that lies, there is nothing to encode.
        near: engine of the session's message before it, with which it is likely to be read.
        num_near: tokens that the session has had encoded there.
    """

    key: bytes
    near: int | None
    num_near: int


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
        measured: rates of encoding and of moves.
        mover: moves between the engines; none are made before `move_by`.
        num_again, tokens_again: messages that engines were made to encode though they had been
            encoded before, and their tokens; by engine.
        journal: journal of what sessions make and free; None: they end with this process.
        pictures: pictures of the sessions' recipes.

    Raises:
        ChoreoError: files cannot be put into the folder that is set for moves.
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
        self._block_size = cache.block_size
        self.measured = MeasuredRates(_token_bytes(config), False, cache.block_size / 2)
        self.mover = Mover(self.measured)
        if client.can_move:
            folder = exchange_folder(settings.move_folder)
            self.move_by(FolderTransfer(MoveFiles(config, folder, client)))
        self.num_again, self.tokens_again = [0] * count, [0] * count
        self.queued = [0] * count
        # What messages have an encoding on an engine: their sessions by their ids.
        self._holders: list[dict[Hashable, dict[str, str]]] = [{} for _ in range(count)]
        self._clients = client.clients  # not their owner, which would then never be collected
        self.journal: SessionJournal | None = None
        self.pictures = SharedPictures()
        self._turn = 0
        self._starts = client.starts
        self._resources = client.resources
        self._lives = client.lives
        self._changed = asyncio.Event()
        for engine in set(range(count)) - set(client.alive):
            self.on_end(engine)
        client.watcher = self

    def move_by(self, transfer: Transfer) -> None:
        """Have messages moved between the engines in this way from now on."""
        self.mover.transfer = transfer
        self.measured.can_move = True

    # -- what happens to engines -----------------------------------------------------------------

    def on_end(self, engine: int) -> None:
        """Forget what an engine had, and place no calls there."""
        self.homes.remove_engine(engine)
        self._holders[engine].clear()
        self.queued[engine] = 0
        self.loads.put(engine, _ENDED)

    def on_start(self, engine: int) -> None:
        """Place calls on an engine that runs again."""
        self.loads.put(engine, 0.0)
        self._changed.set()

    def life(self, engine: int) -> int:
        """Number of an engine's life: another one, once it has ended."""
        return self._starts[engine] if self.is_alive(engine) else -1

    def expect(self, message_id: str, engine: int, life: int) -> None:
        """Let the request that makes a message reach its engine in this life of it alone."""
        self._lives[message_id, engine] = life

    def expect_no_more(self, message_id: str, engine: int) -> None:
        """Take back `expect`, if no request has come."""
        self._lives.pop((message_id, engine), None)

    def is_alive(self, engine: int) -> bool:
        """Return whether an engine runs, and takes calls."""
        return self.loads.queue[engine] != _ENDED

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that run."""
        return [engine for engine in range(self.num_engines) if self.is_alive(engine)]

    @property
    def num_engines(self) -> int:
        return len(self.loads.queue)

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

    def place(
        self,
        recipes: Sequence[CallRecipe],
        num_new: int,
        only: int | None = None,
        given: GivenMessage | None = None,
        coming: Mapping[Hashable, int] = _NOTHING,
    ) -> Placement:
        """Choose the engine of a call, one that runs, and count its work there.

        Args:
            recipes: messages that the call reads.
            num_new: tokens of the call itself.
            only: the engine, if there is no choice.
            given: message that it makes, if its tokens are known before it runs.
            coming: engines on which messages that it reads are being made, by their keys.

        Raises:
            EngineRestartedError: that engine does not run.
        """
        self._turn += 1
        reads = [self._read(recipe, coming.get(recipe.key)) for recipe in recipes]
        rates, near = self.measured.rates(), self._near_coming(recipes, coming)
        if given is not None:
            own = self.homes.read(given.key, num_new)
            if own.homes:
                reads, num_new = [*reads, own], 0
            else:
                near = near or self._near(given, num_new, rates)
        named = candidates_of(reads, self.loads, self._turn) if only is None else [only]
        if near is not None and only is None:
            named.append(near.engine)
        candidates = [engine for engine in named if self.is_alive(engine)]
        if not candidates and only is not None:
            raise EngineRestartedError("the engine has ended", parameter="engine", value=only)
        found = place(reads, rates.encode * num_new, candidates, self.loads.queue, rates, near)
        self.loads.add(found.engine, found.cost)
        self.queued[found.engine] += 1
        return found

    def _read(self, recipe: CallRecipe, coming: int | None) -> Read:
        """Where a message lies, and the engine on which it is being made, if there is one."""
        read = self.homes.read(recipe.key, recipe.num_tokens)
        if coming is None or coming in read.homes:
            return read
        return Read(read.key, read.num_tokens, {coming, *read.homes})

    def _near_coming(
        self, recipes: Sequence[CallRecipe], coming: Mapping[Hashable, int]
    ) -> Near | None:
        """Engine that makes most of what a call reads, which would be waited for elsewhere."""
        num_coming = Counter[int]()
        for recipe in recipes:
            if recipe.key in coming and self.is_alive(coming[recipe.key]):
                num_coming[coming[recipe.key]] += recipe.num_tokens
        for engine, _ in num_coming.most_common(1):
            return Near(engine, self.loads.queue[engine])
        return None

    def _near(self, given: GivenMessage, num_new: int, rates: Rates) -> Near | None:
        """Engine where a session's messages are together, unless they fill half of it."""
        if given.near is None:
            return None
        num_together = given.num_near + num_new
        if 2 * num_together > self.homes.capacity(given.near):
            return None
        return Near(given.near, rates.encode * min(num_together, _MAX_APART))

    def on_done(self, placed: Placement, life: int) -> None:
        """Take a call's work off its engine, if that has not ended since."""
        if self.life(placed.engine) == life:
            self.loads.add(placed.engine, -placed.cost)
            self.queued[placed.engine] -= 1

    # -- what lies where -------------------------------------------------------------------------

    def enter(self, engine: int, recipe: CallRecipe) -> None:
        """Enter a message that an engine has, or that a call reads there."""
        params = recipe.call.params
        self.homes.add(recipe.key, engine, recipe.num_tokens, params.tenant)
        self._holders[engine].setdefault(recipe.key, {})[recipe.id] = params.session

    def leave(self, engine: int, key: Hashable, message_id: str) -> None:
        """Forget a message that an engine has freed; and its encoding, if it was the last one."""
        held = self._holders[engine].get(key, {})
        held.pop(message_id, None)
        if not held:
            self._holders[engine].pop(key, None)
            self.homes.leave(key, engine)

    def on_encoded_again(self, engine: int, recipe: CallRecipe) -> None:
        """Count a message that an engine has encoded, though another one had."""
        self.num_again[engine] += 1
        self.tokens_again[engine] += recipe.num_tokens

    def moved(
        self, recipe: CallRecipe, engine: int, complete: Complete
    ) -> AbstractAsyncContextManager[None] | None:
        """Have a message's keys and values in an engine meanwhile; None: it is rather encoded.

        Args:
            complete: see `Mover.moved`.
        """
        if recipe.num_tokens <= self._block_size:
            return None  # engines share whole blocks, and the last one runs
        read = self.homes.read(recipe.key, recipe.num_tokens)
        if engine in read.homes:
            return None  # a message of another session has them
        source = source_of(read, self.loads.queue, self.measured.rates())
        if source is None:
            return None
        for message_id, session in self._holders[source].get(recipe.key, {}).items():
            holder = Holder(source, session, message_id)
            return self.mover.moved(recipe, holder, self._clients, engine, complete)
        return None

    def one(self, engine: int) -> OneEngine:
        """One of the engines, in the life that it has now.

        Raises:
            EngineRestartedError: it has ended.
        """
        client = self._clients[engine]
        if client is None:
            raise EngineRestartedError("the engine has ended", parameter="engine", value=engine)
        return OneEngine(client)

    def describe(self) -> list[EngineState]:
        """State of each engine, by its number."""
        return [
            EngineState(
                engine=engine,
                is_running=self.is_alive(engine),
                restarts=max(0, self._starts[engine] - 1),
                queued_calls=self.queued[engine],
                queued_seconds=self.loads.queue[engine] if self.is_alive(engine) else 0.0,
                messages=self.homes.count(engine),
                tokens=self.homes.used(engine),
                bytes=self.measured.bytes_of(self.homes.used(engine)),
                moves=self.mover.of(engine),
                encoded_again_messages=self.num_again[engine],
                encoded_again_tokens=self.tokens_again[engine],
            )
            for engine in range(self.num_engines)
        ]


@dataclass(frozen=True)
class EngineState:
    """State of an engine, as the front knows it.

    Attributes:
        engine: its number.
        is_running: whether it takes calls.
        restarts: how often it was started again.
        queued_calls, queued_seconds: calls that it has, and the work of these by measured rates.
        messages, tokens, bytes: encodings that lie there, as far as its memory goes.
        moves: moves to it.
        encoded_again_messages, encoded_again_tokens: messages that it was made to encode though
            they had been encoded before.
    """

    engine: int
    is_running: bool
    restarts: int
    queued_calls: int
    queued_seconds: float
    messages: int
    tokens: int
    bytes: int
    moves: MoveCounts
    encoded_again_messages: int
    encoded_again_tokens: int

    def totals(self) -> dict[str, int]:
        """Counts of events, by the names of metrics."""
        return {
            "moved_messages_total": self.moves.moved,
            "moved_tokens_total": self.moves.tokens,
            "moved_bytes_total": self.moves.bytes,
            "failed_moves_total": self.moves.failed,
            "remade_messages_total": self.encoded_again_messages,
            "remade_tokens_total": self.encoded_again_tokens,
            "engine_restarts_total": self.restarts,
        }


def _token_bytes(config: VllmConfig) -> float:
    """Bytes of a token's keys and values, about."""
    model = config.model_config
    heads = model.get_total_num_kv_heads() * model.get_head_size()
    return float(2 * 2 * model.get_total_num_hidden_layers() * heads)


# Of each engine alike, where everything else is added up.
_SIZES = ("block_size", "block_bytes", "state_bytes")


def added_stats(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of engines to "stats" or "counts" as one; each message names its `engine`."""
    from vllm_choreo.engine.utility import added

    listed = list(answers.values())
    total = {**added(listed), **{name: listed[0][name] for name in _SIZES if name in listed[0]}}
    if "num_blocks_by_group" in total:
        by_group = zip(*(answer["num_blocks_by_group"] for answer in listed), strict=True)
        total["num_blocks_by_group"] = [sum(of_group) for of_group in by_group]
    if "messages" in total:
        total["messages"] = [
            {**message, "engine": engine}
            for engine, answer in answers.items()
            for message in answer["messages"]
        ]
    return total


async def totals_by_engine(async_llm: AsyncLLM) -> dict[int, dict[str, Any]]:
    """The operation "totals" of each engine that runs; of several, with what moves have done.

    Raises:
        EngineDeadError: no engine runs.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    from vllm_choreo.engine.utility import call_async

    fleet = fleet_of(async_llm)
    engines = [0] if fleet is None else fleet.alive
    asked = [call_async(async_llm, "totals", engine=engine) for engine in engines]
    found = await asyncio.gather(*asked, return_exceptions=True)
    answers = {e: answer for e, answer in zip(engines, found, strict=True) if _is_answer(answer)}
    if not answers:
        raise EngineDeadError
    states = [] if fleet is None else fleet.describe()
    return {
        engine: {**answer, **(states[engine].totals() if states else {})}
        for engine, answer in answers.items()
    }


def _is_answer(answer: object) -> TypeGuard[dict[str, Any]]:
    """Return whether an engine has answered; raises an error that is none of an engine's end."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
        raise answer
    return isinstance(answer, dict)

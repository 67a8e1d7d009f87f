# SPDX-License-Identifier: Apache-2.0
"""Moves of keys and values from one engine of a fleet to another.

A message is saved by the engine where it lies, as `save` would, and loaded by the other one under a
name that no session has (`fleet_transfer.py`). There the call that makes the message known runs as
ever: the engine finds that it has these keys and values, and shares them, and the loaded name is
freed. So nothing depends on a move but time: where one fails, the call encodes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vllm_choreo.api.fleet_transfer import Move, Transfer
from vllm_choreo.api.one_engine import OneEngine, ask_engine
from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.errors import (
    EngineRestartedError,
    FreedMessageError,
    PoolFullError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.fleet.measured import MeasuredRates
from vllm_choreo.semantics.message import Saved
from vllm_choreo.snapshot.moving import MoveOrder

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import AsyncMPClient

_LOGGER = logging.getLogger("vllm.choreo.fleet")
_KEY_BYTES = 32
# At a time: files of more would take memory, and wait for the same two engines.
_MAX_MOVES = 4
# After so many failures in a row that neither calls nor the ends of engines explain, none is tried.
_MAX_FAILURES = 5
_EXPECTED = (EngineRestartedError, FreedMessageError, PoolFullError, UnknownMessageError)


class Holder(NamedTuple):
    """A message that an engine knows, and that has an encoding which is wanted elsewhere."""

    engine: int
    session: str
    message_id: str


# Has a message encoded where it is known, as far as it is not.
Complete = Callable[[Holder], Awaitable[None]]


@dataclass
class MoveCounts:
    """Moves to or from an engine, or of all engines.

    Attributes:
        moved, failed: moves that were made, and those that were not.
        tokens, bytes: tokens that were moved, and their keys and values.
    """

    moved: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0


class Mover:
    """Moves between the engines of one AsyncLLM.

    Args:
        measured: rates, which moves add to.

    Attributes:
        counts: moves by target engine.
        total: all moves.
        transfer: how keys and values come from one to another; None: not yet known.
    """

    def __init__(self, measured: MeasuredRates) -> None:
        self.counts: dict[int, MoveCounts] = {}
        self.total = MoveCounts()
        self.transfer: Transfer | None = None
        self._measured = measured
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._session = f"moves-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(_MAX_MOVES)
        self._num_failures = 0

    @asynccontextmanager
    async def moved(
        self,
        recipe: CallRecipe,
        holder: Holder,
        clients: Sequence[AsyncMPClient | None],
        target: int,
        complete: Complete,
    ) -> AsyncIterator[None]:
        """Have the keys and values of a message in an engine, under a name of ours, meanwhile.

        A move that fails is logged and counted: the message is encoded.

        Args:
            holder: an engine that has them, and a message there that they are of.
            clients: clients of the engines; None: it has ended.
            target: number of the engine.
            complete: has a message encoded where it is known, as far as it is not.
        """
        assert self.transfer is not None, "no moves are chosen before"
        scratch_id = f"{self._session}/{next(self._numbers)}"
        source, into = clients[holder.engine], clients[target]
        if source is None or into is None:
            self._on_failed(target, EngineRestartedError("an engine has ended", parameter="engine"))
            yield
            return
        try:
            async with self._slots:
                began = time.perf_counter()
                order = self._order(recipe, holder, scratch_id)
                move = Move(order, source, into, partial(complete, holder))
                saved = await self.transfer.move(move)
                self._measured.on_moved(saved.tokens, saved.bytes, time.perf_counter() - began)
        except Exception as error:
            self._on_failed(target, error)
        else:
            self._on_moved(target, saved)
        try:
            yield
        finally:
            await self._free(OneEngine(into), scratch_id)

    def _order(self, recipe: CallRecipe, holder: Holder, scratch_id: str) -> MoveOrder:
        return MoveOrder(
            holder.session,
            holder.message_id,
            tuple(recipe.call.token_ids),
            recipe.call.params.tenant,
            self._session,
            scratch_id,
            self._key,
        )

    async def _free(self, engine: OneEngine, scratch_id: str) -> None:
        try:
            await ask_engine(engine, "free", self._session, [scratch_id])
        except EngineRestartedError:
            return  # with all that it had

    # -- counts ------------------------------------------------------------------------------------

    def of(self, engine: int) -> MoveCounts:
        """Moves to an engine."""
        return self.counts.setdefault(engine, MoveCounts())

    def _on_moved(self, target: int, saved: Saved) -> None:
        self._num_failures = 0
        for counts in (self.total, self.of(target)):
            counts.moved += 1
            counts.tokens += saved.tokens
            counts.bytes += saved.bytes

    def _on_failed(self, target: int, error: Exception) -> None:
        for counts in (self.total, self.of(target)):
            counts.failed += 1
        if isinstance(error, _EXPECTED):
            _LOGGER.info("nothing was moved to engine %d, which encodes it: %s", target, error)
            return
        self._num_failures += 1
        _LOGGER.warning("nothing was moved to engine %d, which encodes it: %r", target, error)
        is_hopeless = isinstance(error, UnsupportedOptionError)
        if is_hopeless or self._num_failures >= _MAX_FAILURES:
            self._measured.can_move = False
            _LOGGER.error("from now on nothing is moved between engines: messages are encoded")

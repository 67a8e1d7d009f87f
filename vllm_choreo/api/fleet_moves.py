# SPDX-License-Identifier: Apache-2.0
"""Moves of keys and values from one engine of a fleet to another, through files in memory.

A message is saved by the engine where it lies, as `save` would, and loaded by the other one under a
name that no session has. There the call that makes the message known runs as ever: the engine finds
that it has these keys and values, and shares them. So nothing depends on a move but time: where one
fails, the call encodes.

    source    describe, hold, read  ->  a folder  ->  begin, allocate, write, commit    target
    target    prefill of the message, which starts from what was loaded; the loaded name is freed
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm_choreo.api.outcomes import checked_answer
from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    PoolFullError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.fleet.measured import MeasuredRates
from vllm_choreo.semantics.message import Message, Metrics, Saved, Usage
from vllm_choreo.snapshot.loading import loading
from vllm_choreo.snapshot.manifest import tenant_digest
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.saving import saving
from vllm_choreo.snapshot.signature import signature
from vllm_choreo.snapshot.steps import Ask, drive_async
from vllm_choreo.snapshot.storage import SnapshotFolder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

_LOGGER = logging.getLogger("vllm.choreo.fleet")
# Memory that is mounted as a folder.
_MEMORY = Path("/dev/shm")
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
_Answer = Callable[[Ask], Awaitable[object]]


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


class OneEngine:
    """One of several engines, as operations take an AsyncLLM: in the life that it has now.

    Args:
        client: vLLM's client of the engine.
    """

    def __init__(self, client: AsyncMPClient) -> None:
        self.engine_core = client

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        """Run a method of the engine's workers; one answer each."""
        answers: list[Any] = await self.engine_core.collective_rpc_async(method, None, args)
        return answers


def exchange_folder(folder: str) -> Path:
    """Make a folder of this process alone, which is removed at its end.

    Args:
        folder: the folder to make it in; "": one in memory, or else one for temporary files.

    Raises:
        ChoreoError: there is no such folder, or nothing can be written there.
    """
    parent = Path(folder).expanduser() if folder else _MEMORY
    if not folder and not (parent.is_dir() and os.access(parent, os.W_OK)):
        parent = Path(tempfile.gettempdir())
    try:
        return Path(tempfile.mkdtemp(prefix="vllm-choreo-moves-", dir=parent))  # mode 0700
    except OSError as error:
        raise ChoreoError(
            f"keys and values cannot be moved through this folder ({error.strerror}): name one in "
            "memory that this user can write to, such as /dev/shm, or leave the setting out",
            parameter="additional_config.choreo.move_folder",
            value=str(parent),
        ) from None


class Mover:
    """Moves between the engines of one AsyncLLM.

    Args:
        config: the configuration that all of them have.
        folder: folder that files go through; see `exchange_folder`. Removed with `owner`.
        measured: rates, which moves add to.

    Attributes:
        counts: moves by target engine.
        total: all moves.
        folder: folder that files go through.
    """

    def __init__(
        self, config: VllmConfig, folder: Path, owner: object, measured: MeasuredRates
    ) -> None:
        self.counts: dict[int, MoveCounts] = {}
        self.total = MoveCounts()
        self._config = config
        self.folder = folder
        self._measured = measured
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._session = f"moves-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(_MAX_MOVES)
        self._num_failures = 0
        self._signature: dict[str, Any] | None = None
        weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)

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
        scratch_id = f"{self._session}/{next(self._numbers)}"
        source, into = clients[holder.engine], clients[target]
        if source is None or into is None:
            self._on_failed(target, EngineRestartedError("an engine has ended", parameter="engine"))
            yield
            return
        try:
            async with self._slots:
                answer_source = _answerer(OneEngine(source), partial(complete, holder))
                answer_target = _answerer(OneEngine(into))
                saved = await self._move(recipe, holder, answer_source, answer_target, scratch_id)
        except Exception as error:
            self._on_failed(target, error)
        else:
            self._on_moved(target, saved)
        try:
            yield
        finally:
            await self._free(OneEngine(into), scratch_id)

    async def _move(
        self,
        recipe: CallRecipe,
        holder: Holder,
        answer_source: _Answer,
        answer_target: _Answer,
        scratch_id: str,
    ) -> Saved:
        """Save in one engine, load in the other; raises whatever prevents it."""
        tenant = recipe.call.params.tenant
        began = time.perf_counter()
        path = self.folder / str(next(self._numbers))
        try:
            room = shutil.disk_usage(self.folder).free
            folder = SnapshotFolder(path, "the exchange folder", room, self._key)
            message = _record(recipe, holder.message_id)
            steps = saving([message], folder, self._origin(holder.session, tenant), True, False)
            saved = await drive_async(steps, answer_source)
            told: dict[str, Any] = {}

            async def note(ask: Ask) -> object:
                answer = await answer_target(ask)
                if ask.args[0] == "snapshot_commit" and isinstance(answer, dict):
                    told.update(answer)
                return answer

            loads = loading(
                folder,
                self._origin(self._session, tenant),
                tenant,
                lambda session, ids: dict.fromkeys(ids, scratch_id),
                lambda messages: None,
                lambda: None,
                "refuse",
                False,
            )
            await drive_async(loads, note)
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        if not told.get("tokens"):
            raise PoolFullError("the other engine has no room for it now", parameter="messages")
        self._measured.on_moved(saved.tokens, saved.bytes, time.perf_counter() - began)
        return saved

    def _origin(self, session: str, tenant: str) -> Origin:
        config = self._config
        if self._signature is None:
            self._signature = signature(config)
        return Origin(
            session,
            tenant_digest(tenant),
            self._signature,
            config.parallel_config.tensor_parallel_size,
            config.model_config.get_total_num_kv_heads(),
            config.model_config.get_vocab_size(),
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


def _record(recipe: CallRecipe, message_id: str) -> Message:
    """A message as a save names it; of a move, the text and the times are nobody's."""
    return Message(
        id=message_id,
        text="",
        token_ids=recipe.call.token_ids,
        num_tokens=recipe.num_tokens,
        position=0,
        parents=(),
        generated_text="",
        generated_token_ids=(),
        logprobs=None,
        finish_reason=None,
        usage=Usage(exact=False, reused_tokens=0, repositioned_tokens=0, encoded_tokens=0),
        metrics=Metrics(submitted=0.0, waiting=None, ttft=0.0, latency=0.0),
    )


def _answerer(engine: OneEngine, complete: Callable[[], Awaitable[None]] | None = None) -> _Answer:
    """Make a function that answers a save or a load, from one engine.

    Args:
        complete: has the message encoded as far as it is not; its last token, as a rule.
    """

    async def answer(ask: Ask) -> object:
        if ask.what == "session":
            function, *args = ask.args
            return cast(object, function(*args))
        if ask.what == "workers":
            return await ask_workers(engine, *ask.args)
        if ask.what == "encode":
            assert complete is not None, "loads encode nothing"
            await complete()
            return None
        found = await ask_engine(engine, *ask.args)
        if ask.args[0] == "snapshot_describe":
            assert isinstance(found, dict)
            found["resident"] = []  # no copies of it: whoever reads such makes them
        return found

    return answer


async def ask_engine(engine: OneEngine, operation: str, *args: object) -> object:
    """Run an operation of the scheduler in one engine.

    Raises:
        ChoreoError: it is refused.
        EngineRestartedError: the engine has ended.
    """
    from vllm_choreo.engine.utility import call_async

    with _told_of_its_end():
        answer: object = await call_async(cast("AsyncLLM", engine), operation, *args)
        return checked_answer(answer)


async def ask_workers(engine: OneEngine, method: str, *args: object) -> list[Any]:
    """Run a method of the workers of one engine.

    Raises:
        EngineRestartedError: the engine has ended.
    """
    from vllm_choreo.engine.utility import of_workers_async

    with _told_of_its_end():
        return await of_workers_async(cast("AsyncLLM", engine), method, *args)


@contextmanager
def _told_of_its_end() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineRestartedError(
            "the engine has ended, and starts again: do it once more", parameter="engine"
        ) from None

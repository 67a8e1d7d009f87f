# SPDX-License-Identifier: Apache-2.0
"""Transfers of a message's keys and values between two engines: a save, and a load of it.

    source   describe, hold, read  ->  files in memory  ->  begin, allocate, write, commit   target

The engines' cores write and read the files (`vllm_choreo/engine/moves.py`), in a folder of whoever
orders the move. Where engines are on several machines the files go from one to the other
(`vllm_choreo/cluster/transfer.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from vllm_choreo.api.one_engine import EngineClient, OneEngine, ask_engine
from vllm_choreo.api.snapshots import origin_of
from vllm_choreo.errors import ChoreoError, EngineRestartedError, PoolFullError
from vllm_choreo.semantics.message import Saved
from vllm_choreo.snapshot.manifest import tenant_digest
from vllm_choreo.snapshot.moving import MoveOrder
from vllm_choreo.snapshot.origin import Origin

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Memory that is mounted as a folder.
_MEMORY = Path("/dev/shm")

_T = TypeVar("_T")


class IncompleteMessageError(PoolFullError):
    """Not all of a message is encoded where it is; its last token, as a rule."""


class Move(NamedTuple):
    """A move of a message from one engine to another.

    Attributes:
        order: the message.
        source, target: clients of the engines.
        complete: has the message encoded as far as it is not; its last token, as a rule.
    """

    order: MoveOrder
    source: EngineClient
    target: EngineClient
    complete: Callable[[], Awaitable[None]]


class Transfer(Protocol):
    """How keys and values come from one engine to another."""

    async def move(self, move: Move) -> Saved:
        """Have what is ordered in the target, under its scratch name.

        Returns:
            What was moved.

        Raises:
            Exception: whatever prevents it.
        """


async def export_whole(export: Callable[[], Awaitable[_T]], move: Move) -> _T:
    """Export a message, and have it encoded before if not all of it is."""
    try:
        return await export()
    except IncompleteMessageError:
        await move.complete()
        return await export()


class MoveFiles:
    """Files of moves, in a folder of this process.

    Args:
        config: configuration of the engines.
        folder: the folder, see `exchange_folder`. Removed with `owner`.

    Attributes:
        folder: the folder.
    """

    def __init__(self, config: VllmConfig, folder: Path, owner: object) -> None:
        self.folder = folder
        self._config = config
        self._numbers = itertools.count()
        self._origin: Origin | None = None
        weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A path for the files of one move, which are removed at the end."""
        path = self.folder / str(next(self._numbers))
        try:
            yield path
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def save(self, path: Path, order: MoveOrder, client: EngineClient) -> Saved:
        """Have an engine write the files of a message.

        Raises:
            IncompleteMessageError: not all of it is encoded.
            Exception: whatever else prevents it.
        """
        origin = self._origin_of(order.session, order.tenant)
        told = await _run(client, "export_message", path, order, origin)
        if "is_incomplete" in told:
            raise IncompleteMessageError(
                "not all of the message is encoded where it is", parameter="messages"
            )
        return Saved(*told["saved"])

    async def load(self, path: Path, order: MoveOrder, client: EngineClient) -> None:
        """Have an engine take in the message whose files these are.

        Raises:
            KeptError: the files were not written by this order.
            PoolFullError: it has no room for it now.
            Exception: whatever else prevents it.
        """
        target = self._origin_of(order.scratch_session, order.tenant)
        told = await _run(client, "import_message", path, order, target)
        if not told["loaded"]:
            raise PoolFullError("the other engine has no room for it now", parameter="messages")

    def _origin_of(self, session: str, tenant: str) -> Origin:
        if self._origin is None:
            self._origin = origin_of(self._config, session, tenant)
        return replace(self._origin, session=session, tenant=tenant_digest(tenant))


async def _run(
    client: EngineClient, operation: str, path: Path, order: MoveOrder, origin: Origin
) -> Mapping[str, Any]:
    """Have an engine's core do its part of a move, piece by piece; return what it tells at last."""
    engine, name = OneEngine(client), f"{operation} {order.scratch_id}"
    is_over = False
    try:
        told = await ask_engine(engine, operation, name, str(path), list(order), asdict(origin))
        assert isinstance(told, dict)
        while "is_under_way" in told:
            told = await ask_engine(engine, "continue_move", name)
            assert isinstance(told, dict)
        is_over = True
        return told
    finally:
        if not is_over:
            with suppress(EngineRestartedError):
                await ask_engine(engine, "cancel_move", name)


class FolderTransfer:
    """Transfer through files of this process, between engines of its machine.

    Args:
        files: files of moves.
    """

    def __init__(self, files: MoveFiles) -> None:
        self.files = files

    async def move(self, move: Move) -> Saved:
        async with self.files.scratch() as path:
            saved = await export_whole(
                partial(self.files.save, path, move.order, move.source), move
            )
            await self.files.load(path, move.order, move.target)
        return saved


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

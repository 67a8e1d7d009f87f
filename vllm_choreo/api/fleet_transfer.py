# SPDX-License-Identifier: Apache-2.0
"""Transfers of a message's keys and values between two engines: a save, and a load of it.

    source   describe, hold, read  ->  files in memory  ->  begin, allocate, write, commit   target

On one machine the API server does both, through a folder in memory. Where engines are on several,
each does its own part, and the files go from one to the other (`vllm_choreo/cluster/transfer.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from vllm_choreo.api.one_engine import EngineClient, OneEngine, ask_engine, ask_workers
from vllm_choreo.api.snapshots import origin_of
from vllm_choreo.errors import ChoreoError, PoolFullError
from vllm_choreo.semantics.message import Message, Metrics, Saved, Usage
from vllm_choreo.snapshot.loading import loading
from vllm_choreo.snapshot.manifest import tenant_digest
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.saving import saving
from vllm_choreo.snapshot.steps import Ask, drive_async
from vllm_choreo.snapshot.storage import SnapshotFolder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Memory that is mounted as a folder.
_MEMORY = Path("/dev/shm")

_Answer = Callable[[Ask], Awaitable[object]]


class MoveOrder(NamedTuple):
    """A message that is moved.

    Attributes:
        session, message_id: the message, as its engine knows it.
        token_ids: its tokens.
        tenant: tenant of its session.
        scratch_session, scratch_id: session and name under which the other engine has it meanwhile.
        key: secret with which its files are signed; both sides have it from whoever orders this.
    """

    session: str
    message_id: str
    token_ids: tuple[int, ...]
    tenant: str
    scratch_session: str
    scratch_id: str
    key: bytes


class Transfer(Protocol):
    """How keys and values come from one engine to another."""

    async def move(
        self,
        order: MoveOrder,
        source: EngineClient,
        target: EngineClient,
        complete: Callable[[], Awaitable[None]],
    ) -> Saved:
        """Have what is ordered in the target, under its scratch name.

        Args:
            source, target: clients of the engines.
            complete: has the message encoded as far as it is not; its last token, as a rule.

        Returns:
            What was moved.

        Raises:
            Exception: whatever prevents it.
        """


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

    async def save(
        self,
        path: Path,
        order: MoveOrder,
        client: EngineClient,
        complete: Callable[[], Awaitable[None]],
    ) -> Saved:
        """Write the files of a message; raises whatever prevents it."""
        folder = self._snapshot(path, order)
        origin = self._origin_of(order.session, order.tenant)
        steps = saving([_message(order)], folder, origin, encodings=True, progress=False)
        return await drive_async(steps, _answerer(OneEngine(client), complete))

    async def load(self, path: Path, order: MoveOrder, client: EngineClient) -> None:
        """Give an engine the message whose files these are.

        Raises:
            PoolFullError: it has no room for it now.
            Exception: whatever else prevents it.
        """
        answer = _answerer(OneEngine(client))
        told: dict[str, Any] = {}

        async def note(ask: Ask) -> object:
            found = await answer(ask)
            if ask.args[0] == "snapshot_commit" and isinstance(found, dict):
                told.update(found)
            return found

        steps = loading(
            self._snapshot(path, order),
            self._origin_of(order.scratch_session, order.tenant),
            order.tenant,
            lambda session, ids: dict.fromkeys(ids, order.scratch_id),
            lambda messages: None,
            lambda: None,
            "refuse",
            False,
        )
        await drive_async(steps, note)
        if not told.get("tokens"):
            raise PoolFullError("the other engine has no room for it now", parameter="messages")

    def _snapshot(self, path: Path, order: MoveOrder) -> SnapshotFolder:
        room = shutil.disk_usage(self.folder).free
        return SnapshotFolder(path, "the exchange folder", room, order.key)

    def _origin_of(self, session: str, tenant: str) -> Origin:
        if self._origin is None:
            self._origin = origin_of(self._config, session, tenant)
        return replace(self._origin, session=session, tenant=tenant_digest(tenant))


class FolderTransfer:
    """Transfer through files of this process, between engines of its machine.

    Args:
        files: files of moves.
    """

    def __init__(self, files: MoveFiles) -> None:
        self.files = files

    async def move(
        self,
        order: MoveOrder,
        source: EngineClient,
        target: EngineClient,
        complete: Callable[[], Awaitable[None]],
    ) -> Saved:
        async with self.files.scratch() as path:
            saved = await self.files.save(path, order, source, complete)
            await self.files.load(path, order, target)
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


def _message(order: MoveOrder) -> Message:
    """A message as a save names it; of a move, the text and the times are nobody's."""
    return Message(
        id=order.message_id,
        text="",
        token_ids=order.token_ids,
        num_tokens=len(order.token_ids),
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
    """Make a function that answers a save or a load, from one engine."""

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

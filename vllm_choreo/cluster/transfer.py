# SPDX-License-Identifier: Apache-2.0
"""Transfers of keys and values between replicas, through Ray's object store.

The engine that has a message saves it into files in memory, and its replica puts them into the
object store of its node; the other replica gets them from there, from node to node, and has its
engine load them. The ingress has the reference alone. On one node both see the same memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import ray

from vllm_choreo.api.fleet_transfer import Move, MoveFiles, exchange_folder, export_whole
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.semantics.message import Saved
from vllm_choreo.snapshot.moving import MoveOrder

if TYPE_CHECKING:
    from ray import ObjectRef
    from vllm.config import VllmConfig

    from vllm_choreo.api.one_engine import EngineClient


class Parcel(NamedTuple):
    """A message in the object store, for as long as somebody holds this.

    Attributes:
        saved: counts of messages, tokens and bytes in it.
        files: references to its files, by their names; one, in a tuple, that nobody resolves it
            on the way.
    """

    saved: Saved
    files: tuple[ObjectRef[Mapping[str, np.ndarray]]]


class Replica(Protocol):
    """A replica's part of a move; see `ReplicaClient`."""

    async def export_message(self, order: MoveOrder) -> Parcel: ...

    async def import_message(self, order: MoveOrder, parcel: Parcel) -> None: ...


class ObjectStoreTransfer:
    """Transfer from replica to replica."""

    async def move(self, move: Move) -> Saved:
        # As all engines of a cluster are.
        source, target = cast(Replica, move.source), cast(Replica, move.target)
        parcel = await export_whole(partial(source.export_message, move.order), move)
        await target.import_message(move.order, parcel)
        return parcel.saved


def move_files(config: VllmConfig, owner: object) -> MoveFiles:
    """Files of moves of this process, in the folder that the setting `move_folder` names."""
    folder = exchange_folder(ChoreoConfig.from_vllm(config).move_folder)
    return MoveFiles(config, folder, owner)


async def export_message(files: MoveFiles, order: MoveOrder, client: EngineClient) -> Parcel:
    """Save a message of an engine, and put its files into the object store."""
    async with files.scratch() as path:
        saved = await files.save(path, order, client)
        reference = await asyncio.to_thread(lambda: ray.put(_read(path)))
        return Parcel(saved, (reference,))


async def import_message(
    files: MoveFiles, order: MoveOrder, parcel: Parcel, client: EngineClient
) -> None:
    """Load a message from the object store into an engine; raises whatever prevents it."""
    (reference,) = parcel.files
    async with files.scratch() as path:
        content = await reference
        await asyncio.to_thread(_write, path, content)
        await files.load(path, order, client)


def _read(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.fromfile(path, np.uint8) for path in folder.iterdir()}


def _write(folder: Path, content: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(mode=0o700)
    for name, data in content.items():
        data.tofile(folder / name)

# SPDX-License-Identifier: Apache-2.0
"""Moves through an object store, between engines that keep what they are given; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from tests.api.test_fleet import greedy
from tests.api.test_fleet_moves import (
    SavingEngine,
    home_of,
    model_config,
    only_on,
    read_elsewhere,
    signed_by_another,
    started,
)
from vllm_choreo import AsyncChoreography
from vllm_choreo.api.fleet import Fleet
from vllm_choreo.api.fleet_transfer import MoveFiles
from vllm_choreo.cluster import transfer
from vllm_choreo.cluster.transfer import ObjectStoreTransfer, Parcel
from vllm_choreo.errors import ChoreoError
from vllm_choreo.snapshot.moving import MoveOrder

__all__ = ["model_config"]


class PlayedRef:
    """A reference to what is in the store; it can be lost, as what a node had is with the node."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        if self.content is None:
            raise RuntimeError("the object is lost")
        return self.content


class SavingReplica(SavingEngine):
    """Such an engine, with a replica's part of moves."""

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self.files = MoveFiles(config, folder, self)
        self.exported: list[Parcel] = []

    async def export_message(self, order: MoveOrder) -> Parcel:
        parcel = await transfer.export_message(self.files, order, self)
        self.exported.append(parcel)
        return parcel

    async def import_message(self, order: MoveOrder, parcel: Parcel) -> None:
        await transfer.import_message(self.files, order, parcel, self)


def cluster(
    model_config: Any, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[AsyncChoreography, Fleet, list[SavingReplica]]:
    """A session of two engines that move through a store."""
    patch.setattr(transfer.ray, "put", PlayedRef)
    llm, fleet = started(model_config)
    replicas = [SavingReplica(llm.vllm_config, folder / name) for name in "ab"]
    llm.engine_core.clients[:] = replicas  # type: ignore[list-item]
    fleet.move_by(ObjectStoreTransfer())
    return AsyncChoreography(llm, tenant="t"), fleet, replicas  # type: ignore[arg-type]


def test_what_lies_in_another_replica_comes_through_the_store(
    model_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        c, fleet, replicas = cluster(model_config, tmp_path, monkeypatch)
        with only_on(fleet, 0):
            chain = [await c.prefill([7] * 100)]
            chain.append(await c.prefill([8] * 50, parents=chain))
        await read_elsewhere(fleet, c, chain)
        total = fleet.mover.total
        assert (total.moved, total.failed, total.tokens) == (2, 0, 150)
        assert fleet.num_again == [0, 0]
        assert sum(len(replica.exported) for replica in replicas) == 2
        assert not any(list(replica.files.folder.iterdir()) for replica in replicas)

    asyncio.run(main())


def test_what_is_not_encoded_whole_is_completed_first(
    model_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        c, fleet, replicas = cluster(model_config, tmp_path, monkeypatch)
        answer = await c.decode([5] * 60, sampling_params=greedy())
        home = home_of(fleet, c, answer)
        with only_on(fleet, 1 - home):
            await c.decode([4], parents=[answer], sampling_params=greedy())
        assert (fleet.mover.total.moved, fleet.mover.total.failed) == (1, 0)
        assert {name for _, name in replicas[home].messages} == {answer.id}

    asyncio.run(main())


def test_a_replica_that_could_move_nothing_is_refused(tmp_path: Path) -> None:
    """Before it loads a model: what it is told of is a folder that is not there."""
    missing = str(tmp_path / "missing")
    config: Any = SimpleNamespace(additional_config={"choreo": {"move_folder": missing}})
    with pytest.raises(ChoreoError, match="cannot be moved through this folder") as refused:
        transfer.move_files(config, config)
    assert refused.value.value == missing


@pytest.mark.parametrize("fault", ["lost", "damaged", "cut", "malformed", "another's"])
def test_what_does_not_come_through_is_encoded(
    fault: str, model_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def harm(content: Any) -> PlayedRef:
        (name,) = [name for name in content if name.endswith(".safetensors")]
        if fault == "damaged":
            content[name][-5] ^= 1
        elif fault == "cut":
            content[name] = content[name][:-8]
        elif fault == "malformed":
            content["manifest.json"] = np.frombuffer(b'{"kept": {}}', np.uint8)
        elif fault == "another's":
            signed = signed_by_another(content["manifest.json"].tobytes())
            content["manifest.json"] = np.frombuffer(signed, np.uint8)
        return PlayedRef(None if fault == "lost" else content)

    async def main() -> None:
        c, fleet, replicas = cluster(model_config, tmp_path, monkeypatch)
        monkeypatch.setattr(transfer.ray, "put", harm)
        document = await c.prefill([7] * 100)
        await read_elsewhere(fleet, c, [document])
        assert (fleet.mover.total.moved, fleet.mover.total.failed) == (0, 1)
        assert sum(fleet.num_again) == 1
        assert not any(list(replica.files.folder.iterdir()) for replica in replicas)

    asyncio.run(main())

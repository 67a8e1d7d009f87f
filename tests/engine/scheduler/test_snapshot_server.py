# SPDX-License-Identifier: Apache-2.0
"""What a manifest names, and who may have it, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.store.test_store import SIZE, Pool
from vllm_choreo.engine.scheduler import snapshot_server
from vllm_choreo.engine.scheduler.snapshot_server import SnapshotServer
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.store import MessageStore

ADAPTERS: Any = SimpleNamespace()
NO_PICTURES: Any = None


@pytest.mark.parametrize("is_trusted", [True, False])
def test_only_who_is_trusted_names_a_path_that_is_looked_at(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged manifest may name a device, or a folder of somebody else's."""
    looked_at: list[Path] = []
    read: list[str] = []
    adapters: Any = SimpleNamespace(
        add_from_folder=lambda request: read.append(request.lora_path), of_weights=lambda _: None
    )
    monkeypatch.setattr(
        snapshot_server, "check_loadable", lambda path, config: looked_at.append(path)
    )
    pool: Any = Pool()
    config: Any = object()
    server = SnapshotServer(MessageStore(pool, SIZE), pool, adapters, 100, config, NO_PICTURES)
    entry = {"number": 1, "name": "a", "path": "/dev/zero", "weights": "ab"}
    found = server._adapter({**entry, "is_trusted": is_trusted})
    assert found.weights == b"\xab"
    assert (looked_at, read) == (([Path("/dev/zero")], ["/dev/zero"]) if is_trusted else ([], []))


def test_layers_with_blocks_of_their_own_get_what_they_keep() -> None:
    pool = BlockPool(20, enable_caching=False, hash_block_size=SIZE)
    store = MessageStore(pool, SIZE, windows=(None, 2))
    server = SnapshotServer(store, pool, ADAPTERS, 100, None, NO_PICTURES)

    def allocate(number: int, name: str) -> dict[str, Any]:
        encoding = store.create("s", name).own
        encoding.token_ids, encoding.plan = [7] * (3 * SIZE), CallPlan((), 0, 0, True)
        store.identify(encoding)
        server._loads[number] = SimpleNamespace(encodings=[encoding])  # type: ignore[assignment]
        place = server.allocate(number, 0, 0)
        assert place is not None
        store.duplicates.add(encoding)
        return place

    place = allocate(1, "m")
    full, window = place["blocks"]
    assert len(full) == len(window) == 3 and -1 not in full and window[0] == -1
    assert place["firsts"] == [0, SIZE * window.count(-1)]
    # Blocks of the same message are shared.
    assert allocate(2, "n")["blocks"] == []
    first, second = (server._loads[number].encodings[0] for number in (1, 2))
    assert first.held_blocks == second.held_blocks
    server._described[3] = [(first, ())]
    held = server.hold(3, 0)
    assert held is not None and held["blocks"] == [full, window] and held["state"] is None

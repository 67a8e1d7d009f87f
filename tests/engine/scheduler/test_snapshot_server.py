# SPDX-License-Identifier: Apache-2.0
"""What a manifest names, and who may have it, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.test_store import SIZE, Pool
from vllm_choreo.engine.scheduler import snapshot_server
from vllm_choreo.engine.scheduler.snapshot_server import SnapshotServer
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.store import MessageStore


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
    server = SnapshotServer(MessageStore(pool, SIZE), pool, adapters, 100, config)
    entry = {"number": 1, "name": "a", "path": "/dev/zero", "weights": "ab"}
    found = server._adapter({**entry, "is_trusted": is_trusted})
    assert found.weights == b"\xab"
    assert (looked_at, read) == (([Path("/dev/zero")], ["/dev/zero"]) if is_trusted else ([], []))


def test_layers_with_blocks_of_their_own_get_nothing_from_a_file() -> None:
    """A file has the keys and values of all layers: the message is encoded when it is read."""
    pool: Any = Pool()
    store = MessageStore(pool, SIZE, windows=(None, 6))
    server = SnapshotServer(store, pool, SimpleNamespace(), 100, None)  # type: ignore[arg-type]
    encoding = store.create("s", "m").own
    encoding.token_ids, encoding.plan = [7] * 9, CallPlan((), 0, 0, True)
    store.identify(encoding)
    server._loads[1] = SimpleNamespace(encodings=[encoding])  # type: ignore[assignment]
    assert server.allocate(1, 0, 0) is None and not encoding.blocks
    # Blocks of the same message, which lies in both groups, are shared.
    other = store.create("s", "n").own
    other.token_ids, other.plan = [7] * 9, CallPlan((), 0, 0, True)
    store.identify(other)
    store.duplicates.add(other)
    store.hold(other, [pool.new(3), pool.new(3)], 9)
    assert server.allocate(1, 0, 0) == {"blocks": [], "in_host": False, "hidden": None}
    assert encoding.held_blocks == other.held_blocks
    server._described[2] = [(encoding, ())]
    with pytest.raises(UnsupportedOptionError, match="encodings=False"):
        server.hold(2, 0)

# SPDX-License-Identifier: Apache-2.0
"""Adapters that a manifest names: whose path is looked at, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.test_store import SIZE, Pool
from vllm_choreo.engine.scheduler import snapshot_server
from vllm_choreo.engine.scheduler.snapshot_server import SnapshotServer
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

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the server tests: the servers that they share, and clients of its two tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.selection import SHARES_NEXT
from tests.server.serving import QUICK, Session
from vllm_choreo.testing.server import KEYS, Server, start_server


class _SharedServers:
    """Servers that files share which run one after another in a process: see `tests.selection`."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Server, ExitStack]] = {}

    def get(self, name: str, start: Callable[[], AbstractContextManager[Server]]) -> Server:
        """The server of this name, which is started if it does not run."""
        if name not in self._running:
            with ExitStack() as stack:
                server = stack.enter_context(start())
                self._running[name] = server, stack.pop_all()
        return self._running[name][0]

    def stop(self) -> None:
        """Stop all: one that nobody asks takes a tenth of a core still."""
        while self._running:
            self._running.popitem()[1][1].close()


@pytest.fixture(scope="session")
def _shared_servers() -> Iterator[_SharedServers]:
    servers = _SharedServers()
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def shared_servers(
    request: pytest.FixtureRequest, _shared_servers: _SharedServers
) -> Iterator[_SharedServers]:
    """The servers that run; the next file has them, too, if it shares them."""
    yield _shared_servers
    if not request.config.stash[SHARES_NEXT]:
        _shared_servers.stop()


@pytest.fixture(scope="module")
def server(
    shared_servers: _SharedServers,
    shallow_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """A server of a shallow model with two API keys, on the settings of the plugin."""

    def start() -> AbstractContextManager[Server]:
        folder = tmp_path_factory.mktemp("server")
        kept, settings = str(folder / "kept"), {"hidden_memory_gib": 0.1}
        return start_server(
            shallow_model_path, folder, choreo_keep=kept, settings=settings, **QUICK
        )

    return shared_servers.get("server", start)


@pytest.fixture(scope="module")
def whole_server(
    shared_servers: _SharedServers,
    embedded_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """A server of the embedded model as users start it, for what the documentation shows."""
    return shared_servers.get(
        "whole", lambda: start_server(embedded_model_path, tmp_path_factory.mktemp("whole"))
    )


@pytest.fixture
def alpha(server: Server) -> Iterator[httpx.Client]:
    """A client of the first tenant."""
    with server.client(KEYS[0]) as client:
        yield client


@pytest.fixture
def beta(server: Server) -> Iterator[httpx.Client]:
    """A client of the second tenant."""
    with server.client(KEYS[1]) as client:
        yield client


@pytest.fixture
def session(alpha: httpx.Client) -> Iterator[Session]:
    """A session of the first tenant."""
    opened = Session(alpha)
    yield opened
    alpha.delete(opened.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failed test shows the end of its server's log."""
    report = yield
    used = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(used, Server):
        report.sections.append(("Server log", used.log_tail()))
    return report

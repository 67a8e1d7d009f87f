# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the server tests: the servers that they share, and clients of its two tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import QUICK, Session
from vllm_choreo.testing.server import KEYS, Server, start_server


@pytest.fixture(scope="session")
def server(shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a shallow model with two API keys, on the settings of the plugin."""
    folder = tmp_path_factory.mktemp("server")
    options = {"choreo_keep": str(folder / "kept"), "settings": {"hidden_memory_gib": 0.1}, **QUICK}
    with start_server(shallow_model_path, folder, **options) as running:
        yield running


@pytest.fixture(scope="session")
def whole_server(
    embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of the embedded model as users start it, for what the documentation shows."""
    with start_server(embedded_model_path, tmp_path_factory.mktemp("whole")) as running:
        yield running


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

# SPDX-License-Identifier: Apache-2.0
"""The examples of agents, with the real packages: what they cost, and whether they say the same."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server.chats import ask_chat, tokens_of
from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.testing.server import Server, start_server

pytestmark = pytest.mark.exhaustive  # programs against a server

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
NAMES = ("supervisor", "group_chat", "retrieval")


@pytest.fixture
def server(whole_server: Server) -> Server:
    """Of a model that can answer."""
    return whole_server


@pytest.fixture(scope="module")
def stock_server(
    embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """vLLM without the plugin."""
    options: dict[str, Any] = {"plugin": None, "env": {"VLLM_PLUGINS": ""}}
    folder = tmp_path_factory.mktemp("stock")
    with start_server(embedded_model_path, folder, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def _examples_find_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_both_ways(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "--base-url": f"{server.base_url}/v1",
        "--api-key": server.keys[0],
        "--model": server.model,
        "--documents": "3",
        "--reports": "1",
        "--max-tokens": "4",
    }
    monkeypatch.setattr(sys, "argv", [name, *(word for pair in arguments.items() for word in pair)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    plain, choreographed = re.findall(r"tokens encoded \| ([\d,]+) \| ([\d,]+)", out)[0]
    assert int(choreographed.replace(",", "")) < int(plain.replace(",", ""))
    assert "time to first token" in out


class Recorded(Conversations):
    """Notes every chat that agents send."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.chats: list[dict[str, Any]] = []

    def is_ours(self, body: Mapping[str, Any]) -> bool:
        most = body.get("max_tokens") or body["max_completion_tokens"]
        self.chats.append({"messages": body["messages"], "max_tokens": most})
        return super().is_ours(body)


def said_by(name: str, server: Server, conversations: Conversations) -> list[str]:
    """What the agents of an example say, over the same texts every time."""
    program = importlib.import_module(name)
    way = program.Way(
        f"{server.base_url}/v1", server.keys[0], server.model, conversations,
        num_documents=3, document_reports=1, max_tokens=12, tag="seen by all",
    )  # fmt: skip
    program.run(way)
    return list(way.said)


@pytest.mark.parametrize("name", NAMES)
def test_exact_says_what_the_server_without_the_plugin_says(
    name: str, server: Server, stock_server: Server
) -> None:
    """By our clients, and by requests that name nothing; a second time, too, when all is found."""
    recorded, exact = Recorded("off"), Conversations("exact")
    expected = said_by(name, stock_server, recorded)
    assert len(expected) > 1 and all(expected)
    assert said_by(name, server, exact) == said_by(name, server, exact) == expected

    assert recorded.chats
    reused = []
    for chat in recorded.chats * 2:
        plain = ask_chat(stock_server, **chat)
        found = ask_chat(server, auto="exact", **chat)
        assert tokens_of(found) == tokens_of(plain)
        assert found["usage"]["exact"]
        reused.append(found["usage"]["reused_tokens"])
    assert reused[-1] > 0 and sum(reused[len(recorded.chats) :]) > sum(reused) / 2

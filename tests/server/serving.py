# SPDX-License-Identifier: Apache-2.0
"""Sessions on a server, and whether anything is left of them."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.quick import NUM_BLOCKS, ONE_PROCESS
from vllm_choreo.testing.server import Server

# Options of servers that start sooner.
QUICK: dict[str, Any] = {
    "distributed_executor_backend": ONE_PROCESS,
    "num_gpu_blocks_override": NUM_BLOCKS,
}


class Session:
    """A session that is open on a server, and what a client does in it.

    Attributes:
        id, path: of the session; `path` is that of its routes.
    """

    def __init__(self, client: httpx.Client, **body: Any) -> None:
        self.client = client
        answer = client.post("/v1/choreo/sessions", json=body)
        assert answer.status_code == 200, answer.text
        self.id: str = answer.json()["id"]
        self.path = f"/v1/choreo/sessions/{self.id}"

    def close(self) -> None:
        """Close it, if it is open."""
        assert self.client.delete(self.path).status_code in (200, 404)

    def post(self, body: Any) -> httpx.Response:
        """Run a call, or a list of calls."""
        return self.client.post(f"{self.path}/messages", json=body)

    def call(self, **call: Any) -> dict[str, Any]:
        """Run a call that is to succeed: its message, or the answer to a list."""
        answer = self.post(call)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that is read to its end."""
        with self.client.stream(
            "POST", f"{self.path}/messages", json={**body, "stream": True}
        ) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def message(self, name: str) -> httpx.Response:
        return self.client.get(f"{self.path}/messages/{name}")

    def usage(self) -> dict[str, int]:
        usage: dict[str, int] = self.client.get(self.path).json()["usage"]
        return usage


def leave(server: Server, path: str, body: Any, has_begun: Callable[[], bool]) -> None:
    """Send a request, and go away when it has begun, without an answer."""
    address = httpx.URL(server.base_url)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {server.keys[0]}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + content)
        while not has_begun():
            time.sleep(0.02)
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing was answered
            connection.recv(1)


def num_running(client: httpx.Client) -> float:
    """Requests that vLLM runs or lets wait."""
    lines = client.get("/metrics").text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def num_generated(client: httpx.Client) -> float:
    """Tokens that vLLM has generated since it started."""
    lines = client.get("/metrics").text.splitlines()
    name = "vllm:generation_tokens_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def wait_until_idle(client: httpx.Client) -> None:
    while num_running(client):
        time.sleep(0.05)


def cpu_seconds(server: Server) -> float:
    """What the API server has worked so far, however busy the machine is."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def wait_until_nothing_is_left(server: Server) -> None:
    """With all sessions closed no call runs, and no block is held."""
    from vllm_choreo.server.metrics import POLL_SECONDS

    time.sleep(POLL_SECONDS + 0.5)  # gauges are as old as that
    while any(_gauges(server).values()):
        time.sleep(0.3)


def _gauges(server: Server) -> dict[str, float]:
    """Those that are 0 when no session is open."""
    names = ("num_calls_running", "num_calls_waiting", "num_messages", "kv_cache_usage_perc")
    with server.client() as client:
        page = client.get("/metrics").text
    lines = [re.search(rf"^vllm_choreo:{name}{{.*}} (.*)$", page, re.M) for name in names]
    assert all(lines), page
    return {name: float(line[1]) for name, line in zip(names, lines, strict=True) if line}

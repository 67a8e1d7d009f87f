# SPDX-License-Identifier: Apache-2.0
"""What must not change while others do what they like: a fixed call's tokens, and its time."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

from vllm_choreo.testing.server import Server

_CALL = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
_GAUGES = ("num_sessions", "num_calls_running", "num_calls_waiting", "num_messages")
_IS_LEFT_SECONDS = 60.0


def probe_tokens(server: Server, key: str) -> tuple[list[int], list[int], list[int]]:
    """Those of a fixed call of messages, in mode exact, and of an ordinary request."""
    with server.client(key) as client:
        session = client.post("/v1/choreo/sessions").json()["id"]
        path = f"/v1/choreo/sessions/{session}/messages"

        def made(**call: Any) -> list[int]:
            answer = client.post(path, json=call)
            answer.raise_for_status()
            tokens: list[int] = answer.json()["generated_token_ids"]
            return tokens

        made(type="prefill", content=list(range(5, 75)), save_as="one")
        made(type="prefill", content=list(range(100, 150)), save_as="two")
        ask = {"content": [6, 7, 9], "parents": ["two", "one"], "sampling_params": _CALL}
        tokens = made(**ask), made(**ask, mode="exact")
        client.delete(f"/v1/choreo/sessions/{session}")
        text = {"model": server.model, "prompt": [6, 7, 9], "return_token_ids": True, **_CALL}
        ordinary = client.post("/v1/completions", json=text)
        ordinary.raise_for_status()
        return *tokens, ordinary.json()["choices"][0]["token_ids"]


def left_over(server: Server, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """Sessions, calls, messages and blocks that are held beyond `before`, within a minute."""
    deadline, before = time.monotonic() + _IS_LEFT_SECONDS, before or {}
    while True:
        time.sleep(2.5)  # gauges are as old as that
        now = gauges(server)
        held = {k: v for k, v in now.items() if v > before.get(k, 0)}
        if not held or time.monotonic() > deadline:
            return held


def gauges(server: Server) -> dict[str, float]:
    page = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    found = {}
    for name in (*_GAUGES, "kv_cache_usage_perc"):
        line = re.search(rf"^vllm_choreo:{name}{{.*}} (.*)$", page, re.M)
        assert line is not None, name
        found[name] = float(line[1])
    return found


class Calm(threading.Thread):
    """A third tenant that asks for the same small call again and again, and takes the time.

    Attributes:
        phase: what others do meanwhile; set it as that changes.
        seconds: of each call, by phase.
        failures: of calls that were answered with anything but 200.
    """

    def __init__(self, server: Server, key: str) -> None:
        super().__init__(daemon=True)
        self.phase = "idle"
        self.seconds: dict[str, list[float]] = {}
        self.failures: list[str] = []
        self._server, self._key = server, key
        self._is_over = False

    def run(self) -> None:
        with self._server.client(self._key) as client:
            session = client.post("/v1/choreo/sessions").json()["id"]
            path = f"/v1/choreo/sessions/{session}/messages"
            client.post(path, json={"type": "prefill", "content": [5] * 64, "save_as": "read"})
            while not self._is_over:
                self._call(client, path)
            client.delete(f"/v1/choreo/sessions/{session}")

    def _call(self, client: httpx.Client, path: str) -> None:
        body = {"content": [6, 7], "parents": ["read"], "sampling_params": _CALL}
        phase, begun = self.phase, time.perf_counter()
        try:
            answer = client.post(path, json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            self._is_over = True
            return
        seconds = time.perf_counter() - begun
        if answer.status_code != 200:
            self.failures.append(answer.text[:300])
            return
        if phase == self.phase:
            self.seconds.setdefault(phase, []).append(seconds)
        client.post(f"{path}/free", json={"messages": [answer.json()["id"]]})
        time.sleep(0.01)

    def wait_for(self, phase: str, count: int) -> None:
        """Until so many calls were timed in a phase."""
        self.phase = phase
        while self.is_alive() and not self.has_timed(phase, count):
            time.sleep(0.05)

    def has_timed(self, phase: str, count: int) -> bool:
        """Whether so many calls were timed in a phase."""
        return len(self.seconds.get(phase, ())) >= count

    def stop(self) -> None:
        self._is_over = True
        self.join(120)


def quantile(seconds: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

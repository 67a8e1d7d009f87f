# SPDX-License-Identifier: Apache-2.0
"""Several clients free, evict, pin and read one message at the same time."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.server.serving import Session
from tests.server.test_routes import GREEDY
from vllm_choreo.testing.server import Server

_NUM_ROUNDS = 25
_ACTIONS = [
    ("DELETE", ""),
    *[("POST", "/evict"), ("POST", "/pin"), ("DELETE", "/pin")] * 2,
    ("DELETE", ""),
]


@pytest.mark.parametrize("order", [1, -1], ids=["free first", "free last"])
def test_clients_that_race_for_a_message(server: Server, session: Session, order: int) -> None:
    """Each is answered with 200, or is told that the message is gone; the engine lives on."""
    clients = [server.client() for _ in _ACTIONS]
    start = Barrier(len(_ACTIONS))

    def act(client: httpx.Client, action: tuple[str, str], name: str) -> httpx.Response:
        method, route = action
        start.wait()
        return client.request(method, f"{session.path}/messages/{name}{route}")

    statuses: Counter[int] = Counter()
    wrong: list[tuple[Any, ...]] = []
    with ThreadPoolExecutor(len(_ACTIONS)) as pool:
        for number in range(_NUM_ROUNDS):
            name = f"m{number}"
            session.call(type="prefill", content=[5 + number] * 40, save_as=name)
            actions = _ACTIONS[::order]
            running = [
                pool.submit(act, client, action, name)
                for client, action in zip(clients, actions, strict=True)
            ]
            for action, answer in zip(
                actions, (future.result() for future in running), strict=True
            ):
                statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    continue
                error = answer.json()["error"]
                if (answer.status_code, error["param"]) != (404, "name"):
                    wrong.append((*action, answer.status_code, error["message"][:120]))
            assert session.message(name).status_code == 404
    for client in clients:
        client.close()
    assert not wrong, (statuses, wrong[:3])
    # So that something raced at all: some were answered, some came too late.
    assert set(statuses) == {200, 404}, statuses
    assert session.usage()["messages"] == 0
    made = session.call(content="So", save_as="after", sampling_params=GREEDY)
    assert made["usage"]["completion_tokens"] == GREEDY["max_tokens"]

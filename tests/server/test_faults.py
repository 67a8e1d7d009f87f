# SPDX-License-Identifier: Apache-2.0
"""What breaks: clients that vanish, sessions closed under running calls, an engine that is killed.

On a server of a tiny model with a small pool, so that a leaked block or call shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import Session, leave, num_generated, wait_until_nothing_is_left
from vllm_choreo import ChoreoClient
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    ParentFailedError,
    PoolFullError,
)
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = pytest.mark.exhaustive  # servers of its own

POOL_BLOCKS = 41
LONG = {"temperature": 0.0, "max_tokens": 500, "ignore_eos": True}
LONGEST = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
# So many calls that their tokens take minutes: the pool has room for one or two of them at a time.
# They are not complete when a test has seen them begin, however busy the machine is.
MANY = 40


@pytest.fixture(scope="module")
def tiny_server(tiny_model_path: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[Server]:
    with _start(tiny_model_path("llama"), tmp_path_factory.mktemp("faults")) as server:
        yield server


def _start(model: Path, folder: Path) -> Any:
    return start_server(
        model,
        folder,
        num_gpu_blocks_override=POOL_BLOCKS,
        block_size=32,
        max_model_len=1024,
    )


def _tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return [(17 * i + 31 * seed) % 500 + 5 for i in range(num_tokens)]


@contextlib.contextmanager
def _nothing_left(server: Server) -> Iterator[None]:
    """After the block no call runs, and no block is held."""
    yield
    wait_until_nothing_is_left(server)


@pytest.fixture
def c(tiny_server: Server) -> Iterator[ChoreoClient]:
    with (
        _nothing_left(tiny_server),
        ChoreoClient(tiny_server.base_url, api_key=KEYS[0]) as client,
    ):
        yield client


def test_closing_ends_the_calls_that_run(tiny_server: Server) -> None:
    c = ChoreoClient(tiny_server.base_url, api_key=KEYS[0])
    doc = c.prefill(_tokens(60))
    errors: list[ChoreoError] = []

    def decode(thread: int) -> None:
        calls = [
            {"header": [5, i], "parents": [doc], "save_as": f"{thread}-{i}"} for i in range(MANY)
        ]
        try:
            c.decode(calls, sampling_params=LONGEST)
        except ChoreoError as error:
            errors.append(error)

    with _nothing_left(tiny_server), tiny_server.client() as http:
        threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for i in range(4):
            _wait_until_begun(http, f"/v1/choreo/sessions/{c.session}/messages/{i}-{MANY - 1}")
        c.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(errors) == 4
        with pytest.raises(ChoreoError):
            c.prefill([5])


def _wait_until_begun(client: httpx.Client, path: str) -> None:
    """Until a call has the name of its message."""
    while client.get(path).status_code == 404:
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_takes_its_calls_along(tiny_server: Server, stream: bool) -> None:
    """Without a word: the connection breaks, with a child waiting for its parent."""
    calls = [
        {"content": [5, 6], "save_as": "parent"},
        {"content": [7], "save_as": "child", "parents": ["parent"]},
        *({"content": [8, i]} for i in range(MANY)),
        {"content": [9], "save_as": "last"},
    ]
    body = {"calls": [{**call, "sampling_params": LONG} for call in calls], "stream": stream}
    with (
        _nothing_left(tiny_server),
        tiny_server.client() as client,
        contextlib.closing(Session(client)) as session,
    ):
        before = num_generated(client)
        path = f"{session.path}/messages"
        if stream:
            with client.stream("POST", path, json=body) as response:
                next(response.iter_lines())
        else:
            leave(tiny_server, path, body, lambda: session.message("child").status_code != 404)
        for name in ("parent", "child", "last"):  # can be used again, as those of calls that ended
            complete = _wait_until_free(session, name)
            assert not complete or name == "parent", "on a busy machine that one may be in time"
        assert client.delete(session.path).status_code == 200
        assert num_generated(client) - before < MANY * LONG["max_tokens"], "it has run on"


def _wait_until_free(session: Session, name: str) -> bool:
    """Until a message can be made under a name, or tell that the call of that name is complete."""
    call = {"content": [5], "save_as": name, "sampling_params": SHORT}
    while (answer := session.post(call)).status_code == 409:
        if session.message(name).status_code == 200:
            return True
        time.sleep(0.1)
    assert answer.status_code == 200, answer.text
    return False


def test_clients_that_neither_read_nor_write_delay_nobody(tiny_server: Server) -> None:
    """Answers that nobody takes, bodies and headers that never end: their session ends, too."""
    host, _, port = tiny_server.base_url.removeprefix("http://").partition(":")
    with _nothing_left(tiny_server), contextlib.ExitStack() as stack:
        idle, other = (stack.enter_context(tiny_server.client(key)) for key in KEYS)
        session, others = (
            stack.enter_context(contextlib.closing(Session(client, **body)))
            for client, body in ((idle, {"ttl_seconds": 2}), (other, {}))
        )
        body = json.dumps(
            {"content": [5], "stream": True, "sampling_params": {**LONG, "logprobs": 5}}
        )
        head = (
            f"POST {session.path}/messages HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
        )
        whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        for sent in (*[whole] * 8, *[f"{head}Content-Length: 99\r\n\r\n{{"] * 100, *[head] * 8):
            connection = stack.enter_context(contextlib.closing(socket.socket()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            connection.sendall(sent.encode())
        for _ in range(5):
            others.call(content=[5, 6], sampling_params=SHORT)
        assert other.delete(others.path).status_code == 200
        expired = f'{{"event":"choreo.session.expired","session":"{session.id}"}}'
        while expired not in tiny_server.log.read_text():  # to look at it would be to use it
            time.sleep(0.1)
        assert idle.get(session.path).status_code == 404
    assert "Traceback" not in tiny_server.log.read_text(), "that a client went away is no error"


def test_a_failed_parent_fails_its_children_alone(c: ChoreoClient, tiny_server: Server) -> None:
    # Padded to whole blocks they are too long; that, only the engine knows.
    docs = c.prefill([{"tokens": _tokens(33, i)} for i in range(20)])
    calls = [
        {"content": [5], "parents": [doc.id for doc in docs], "save_as": "large"},
        {"content": [6], "parents": ["large"]},
        {"content": [7], "parents": [docs[0].id]},
    ]
    with tiny_server.client() as client:
        url = f"/v1/choreo/sessions/{c.session}/messages"
        body = {"calls": [{**call, "sampling_params": SHORT} for call in calls]}
        large, child, other = client.post(url, json=body).json()["data"]
    assert large["error"]["type"] == "TooLongError"
    assert child["error"]["type"] == "ParentFailedError"
    assert other["object"] == "choreo.message" and other["num_tokens"] == 5


def test_a_full_pool_makes_calls_wait_and_what_never_fits_is_refused(c: ChoreoClient) -> None:
    """40 blocks; each call needs 16 of them while it runs, and all complete."""
    docs = c.prefill([{"tokens": _tokens(500, i)} for i in range(6)])
    calls = [{"header": [5, i], "parents": [doc]} for i, doc in enumerate(docs)]
    together = c.decode(calls, sampling_params=SHORT)
    alone = [c.decode(**call, sampling_params=SHORT) for call in calls]
    assert [m.token_ids for m in together] == [m.token_ids for m in alone]
    # Both fit; but to encode one of them again takes its parent, and all three do not fit together.
    lasts = []
    for i in range(2):
        parent = c.prefill(_tokens(620, 10 + i))
        lasts.append(c.prefill(_tokens(340, 20 + i), parents=[parent]))
    c.evict(*lasts)
    with pytest.raises(PoolFullError):
        c.decode([5], parents=lasts, sampling_params=SHORT)
    assert c.decode(**calls[0], sampling_params=SHORT).token_ids == alone[0].token_ids


def test_an_engine_that_is_killed_gives_errors_and_never_wrong_answers(
    tiny_server: Server, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The last test of this server."""
    c = ChoreoClient(tiny_server.base_url, api_key=KEYS[0], timeout=30)
    doc = c.prefill(_tokens(60))
    before = c.decode([5], parents=[doc], sampling_params=SHORT)
    errors: list[ChoreoError] = []

    def decode() -> None:
        try:
            while True:  # a call is running whenever this machine gives the killer its turn
                c.decode([6], parents=[doc], sampling_params=LONGEST)
        except ChoreoError as error:
            errors.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    time.sleep(0.3)
    _kill_engine(tiny_server)
    thread.join(30)
    (error,) = errors
    assert not isinstance(error, ParentFailedError)
    with pytest.raises(ChoreoError) as caught:
        c.decode([5], parents=[doc], sampling_params=SHORT)
    assert "server" in str(caught.value) or isinstance(caught.value, EngineRestartedError)
    # Started again: the old handles are unknown, and what the client kept makes them anew.
    with _start(tiny_model_path("llama"), tmp_path) as server:
        with server.client() as http:
            url = f"/v1/choreo/sessions/{c.session}/messages"
            assert http.post(url, json={"content": [5]}).status_code == 404
        with ChoreoClient(server.base_url, api_key=KEYS[0]) as again:
            with pytest.raises(ChoreoError):
                again.decode([5], parents=[doc], sampling_params=SHORT)
            doc = again.prefill(doc.token_ids)
            after = again.decode([5], parents=[doc], sampling_params=SHORT)
            assert after.token_ids == before.token_ids


def _kill_engine(server: Server) -> None:
    """SIGKILL to the engine core, a child of the API server."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    for pid in children.read_text().split():
        name = Path(f"/proc/{pid}/comm").read_text()
        if "EngineCor" in name or "VLLM::E" in name:
            os.kill(int(pid), signal.SIGKILL)
            return
    raise AssertionError("no engine core among the children of the server")

# SPDX-License-Identifier: Apache-2.0
"""Clients that hang up at any moment, never read, or never end what they send; at many times the
number that the engine runs at once.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.harness.serving import KEYS, Server, start_server
from tests.server.serving import QUICK, Session, wait_until_nothing_is_left

pytestmark = pytest.mark.exhaustive  # a server of its own

NUM_STREAMS = 64
LONG = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True, "logprobs": 5}
CALL = {"content": [6, 7], "parents": ["doc"], "sampling_params": {**LONG, "max_tokens": 20}}
WAYS = ("reset", "close", "shutdown", "half of the body", "whole")


@pytest.fixture(scope="module")
def server(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A pool of 64 blocks: less than the calls ask for."""
    options = {**QUICK, "num_gpu_blocks_override": 64, "block_size": 32, "max_model_len": 1024}
    folder = tmp_path_factory.mktemp("hanging_up")
    with start_server(tiny_model_path("llama"), folder, **options) as running:
        yield running


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.base_url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def request(path: str, key: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path}/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def test_nothing_is_left_of_streams_that_are_hung_up_on(server: Server) -> None:
    with ExitStack() as stack:
        sessions = {key: Session(stack.enter_context(server.client(key))) for key in KEYS}
        for session in sessions.values():
            session.call(type="prefill", content=list(range(5, 105)), save_as="doc")
        expected = sessions[KEYS[0]].call(**CALL)["generated_token_ids"]
        threads = [
            threading.Thread(target=hang_up, args=(server, sessions, number))
            for number in range(NUM_STREAMS)
        ]
        for thread in threads:
            thread.start()
        made = [sessions[KEYS[1]].call(**CALL)["generated_token_ids"] for _ in range(3)]
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert made == [expected] * 3, "whoever else comes and goes"
        assert sessions[KEYS[0]].call(**CALL)["generated_token_ids"] == expected
        for session in sessions.values():
            assert session.client.delete(session.path).status_code == 200
    wait_until_nothing_is_left(server)


def hang_up(server: Server, sessions: dict[str, Session], number: int) -> None:
    """Begin a stream and go away, in one of the ways, after some bytes of it."""
    rng, key = random.Random(number), KEYS[number % 2]
    content = request(sessions[key].path, key, {**CALL, "sampling_params": LONG, "stream": True})
    way = WAYS[number % len(WAYS)]
    with suppress(OSError), connect(server) as connection:
        connection.sendall(content[: len(content) // 2] if way == "half of the body" else content)
        if way == "half of the body":
            return
        num_left = 10**6 if way == "whole" else rng.choice((0, 1, 100, 2000))
        while num_left > 0 and (read := connection.recv(min(num_left, 65536))):
            num_left -= len(read)
            if b"[DONE]" in read:
                break
        if way == "shutdown":
            connection.shutdown(socket.SHUT_WR)
        if way == "reset":
            option = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)


def test_readers_that_never_read_keep_nobody_waiting(server: Server) -> None:
    """And senders that never end: a body, or a head, that comes byte by byte."""
    with ExitStack() as stack:
        mine, theirs = (Session(stack.enter_context(server.client(key))) for key in KEYS)
        theirs.call(type="prefill", content=list(range(5, 105)), save_as="doc")
        expected = theirs.call(**CALL)["generated_token_ids"]
        body = {"content": [5], "sampling_params": LONG, "stream": True}
        unread = [stack.enter_context(connect(server)) for _ in range(8)]
        for connection in unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(request(mine.path, KEYS[0], body))
        unsent = [stack.enter_context(connect(server)) for _ in range(100)]
        for connection in unsent:
            connection.sendall(request(mine.path, KEYS[0], body)[:-1])
        for connection in (stack.enter_context(connect(server)) for _ in range(8)):
            connection.sendall(b"POST /v1/choreo/sessions HTTP/1.1\r\nX: ")
        for _ in range(5):
            assert theirs.call(**CALL)["generated_token_ids"] == expected
        for session in (mine, theirs):
            assert session.client.delete(session.path).status_code == 200
        # Nothing is kept for those who are still there.
        wait_until_nothing_is_left(server)

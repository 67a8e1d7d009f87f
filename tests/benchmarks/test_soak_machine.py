# SPDX-License-Identifier: Apache-2.0
"""What happens to a server's machine: its clock is set, its disk is full, its processes are killed.

What a client sees, what is left, and what the next server finds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.soak.routes.machine import ROLES, Machine, kill
from benchmarks.soak.routes.probe import probe_tokens
from tests.server.serving import QUICK, Session, num_running
from tests.server.test_routes import error_of
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = pytest.mark.exhaustive  # servers of its own

LONG = {"temperature": 0.0, "max_tokens": 800, "ignore_eos": True}
TINY = {"num_gpu_blocks_override": 256, "block_size": 32, "max_model_len": 1024}
# So many calls that their tokens take minutes: a list of them is not complete when a process is
# killed, however long a busy machine takes to do that.
MANY = 60
DAY = 86400


@pytest.fixture(scope="module")
def model(tiny_model_path: Callable[[str], Path]) -> Path:
    return tiny_model_path("llama")


# -- the clock and the disk ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def server(machine: Machine, model: Path) -> Iterator[Server]:
    options = {**QUICK, **TINY, "choreo_keep": str(machine.disk)}
    folder = machine.disk.parent
    with start_server(model, folder, env=machine.environment, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def _as_it_was(machine: Machine) -> Iterator[None]:
    yield
    machine.set()


@pytest.mark.parametrize("ahead", [2 * DAY, -400 * DAY, 2**31])
def test_a_clock_that_is_set_ends_nothing(
    server: Server, machine: Machine, alpha: httpx.Client, ahead: int
) -> None:
    before = probe_tokens(server, KEYS[0])
    session = Session(alpha, ttl_seconds=60)
    session.call(type="prefill", content=[5] * 64, save_as="pinned")
    alpha.post(f"{session.path}/messages/pinned/pin", json={"ttl_seconds": 60})
    told = alpha.get(session.path).json()["expires_at"]
    machine.set(ahead=ahead)
    time.sleep(2.5)  # sessions are looked through each second
    read = alpha.get(session.path).json()
    assert abs(read["expires_at"] - told - ahead) < 60, "the server does see the new time"
    assert read["usage"]["pinned_messages"] == 1
    saved = {"name": f"clock{ahead}", "encodings": True}
    assert alpha.post(f"{session.path}/save", json=saved).status_code == 200
    other = Session(alpha)
    assert alpha.post(f"{other.path}/load", json={"name": saved["name"]}).status_code == 200
    assert probe_tokens(server, KEYS[0]) == before
    for opened in (session, other):
        assert alpha.delete(opened.path).status_code == 200


def test_a_session_expires_though_the_clock_goes_back(
    server: Server, machine: Machine, alpha: httpx.Client
) -> None:
    session = Session(alpha, ttl_seconds=1)
    machine.set(ahead=-DAY)
    time.sleep(2.5)
    assert error_of(alpha.get(session.path), 404)["type"] == "UnknownSessionError"


def test_a_save_that_finds_the_disk_full_harms_nothing(
    server: Server, machine: Machine, alpha: httpx.Client
) -> None:
    session = Session(alpha)
    session.call(type="prefill", content=list(range(5, 300)), save_as="kept")
    body = {"name": "full", "encodings": True}
    assert alpha.post(f"{session.path}/save", json=body).status_code == 200
    session.call(type="prefill", content=list(range(5, 200)), save_as="more")
    machine.set(is_full=True)
    answer = alpha.post(f"{session.path}/save", json=body)
    assert answer.status_code < 500 and answer.json()["error"]["type"] == "KeptError"
    machine.set()
    other = Session(alpha)  # what was saved before is as it was
    loaded = alpha.post(f"{other.path}/load", json={"name": "full"}).json()["data"]
    assert [message["id"].partition("/")[2] for message in loaded] == ["kept"]
    assert alpha.post(f"{session.path}/save", json=body).status_code == 200
    for opened in (session, other):
        alpha.delete(opened.path)


# -- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_takes_the_server_and_no_answer_along(
    model: Path, tmp_path: Path, role: str
) -> None:
    """Clients see an error or a broken connection; a supervisor can start the server again, and
    what was saved is there."""
    options = {**TINY, "choreo_keep": str(tmp_path / "kept")}
    with start_server(model, tmp_path, **options) as server:
        expected = probe_tokens(server, KEYS[0])
        with server.client(KEYS[0]) as client:
            session = Session(client)
            session.call(type="prefill", content=list(range(5, 100)), save_as="doc")
            whole = session.call(content=[6, 7], parents=["doc"], sampling_params=LONG)
            saved = client.post(f"{session.path}/save", json={"name": "a", "encodings": True})
            assert saved.status_code == 200
            streams, lists = ([Seen(), Seen()] for _ in range(2))
            threads = []
            for one in (*streams, *lists):
                num_calls = 1 if one in streams else MANY
                arguments = (server, session.path, one, num_calls)
                threads.append(threading.Thread(target=use, args=arguments))
                threads[-1].start()
                if one in streams:
                    assert one.has_begun.wait(60)
            while num_running(client) < MANY:
                time.sleep(0.05)
        rest, _ = kill(server, role)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not rest, "a supervisor would wait for ever"
        for one in lists:
            assert one.end in (503, "broken"), one
            assert all(tokens == whole["generated_token_ids"] for tokens in one.complete)
        for one in streams:
            assert one.end in (503, "broken", "complete"), one
            assert one.tokens == whole["generated_token_ids"][: len(one.tokens)]
    options["choreo_load"] = str(tmp_path / "kept")
    with start_server(model, tmp_path, **options) as server:
        assert probe_tokens(server, KEYS[0]) == expected
        with server.client(KEYS[0]) as client:
            asked = {"content": [6, 7], "parents": ["doc"], "sampling_params": LONG}
            made = client.post(f"{session.path}/messages", json=asked).json()
            assert made["generated_token_ids"] == whole["generated_token_ids"]


class Seen:
    """What a client sees of a call.

    Attributes:
        tokens: those that it was told of as they came.
        complete: tokens of each message of a list that it was answered.
        end: a status, of a list that of its errors; "broken"; or "complete" if a stream has ended.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.complete: list[list[int]] = []
        self.end: Any = None
        self.has_begun = threading.Event()


def use(server: Server, path: str, seen: Seen, num_calls: int) -> None:
    """Stream a long call, or wait for a list of them, and note what comes of it."""
    call = {"content": [6, 7], "parents": ["doc"], "sampling_params": LONG}
    seen.end = "broken"
    with suppress(httpx.TransportError), server.client(KEYS[0]) as client:
        if num_calls > 1:
            answer = client.post(f"{path}/messages", json={"calls": [call] * num_calls})
            seen.end = answer.status_code
            for result in answer.json()["data"] if answer.status_code == 200 else ():
                if "error" in result:
                    seen.end = result["error"]["code"]
                else:
                    seen.complete.append(result["generated_token_ids"])
            return
        with client.stream("POST", f"{path}/messages", json={**call, "stream": True}) as answer:
            for line in answer.iter_lines():
                seen.has_begun.set()
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("object") == "choreo.message.chunk":
                    seen.tokens += event["token_ids"]
                elif event.get("object") == "choreo.message":
                    seen.end = "complete"
                elif event.get("object") == "error":
                    seen.end = event["error"]["code"]

# SPDX-License-Identifier: Apache-2.0
"""A server with narrow limits: what is too much is refused by the name of the setting, and what is
over is given back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import QUICK, Session, num_running
from tests.server.test_routes import GREEDY, LONG, error_of
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own

SETTINGS = {
    "server": {
        "max_sessions": 3,
        "max_sessions_per_tenant": 2,
        "max_messages_per_session": 4,
        "max_tokens_per_session": 1000,
        "max_calls_per_request": 3,
        "max_request_bytes": 20_000,
        "session_ttl_seconds": 60,
        "max_pin_seconds": 2,
        "page": True,
    }
}


@pytest.fixture(scope="module")
def server(shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    with start_server(shallow_model_path, folder, settings=SETTINGS, **QUICK) as running:
        yield running


def limit_of(answer: httpx.Response, status: int = 429) -> str:
    """The parameter of the limit that an answer says is reached."""
    error = error_of(answer, status)
    assert error["type"] == "LimitError"
    return str(error["param"])


def prefill(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"type": "prefill", "content": [5] * num_tokens, **fields}


# -- sessions ------------------------------------------------------------------------------------


def test_sessions(alpha: httpx.Client, beta: httpx.Client) -> None:
    mine = [Session(alpha), Session(alpha)]
    assert limit_of(alpha.post("/v1/choreo/sessions")) == "max_sessions_per_tenant"
    theirs = Session(beta)
    assert limit_of(beta.post("/v1/choreo/sessions")) == "max_sessions"
    alpha.delete(mine[0].path)
    beta.delete(Session(beta).path)
    for session in (mine[1], theirs):
        session.client.delete(session.path)


def test_unused_sessions_are_closed(alpha: httpx.Client, server: Server) -> None:
    answer = alpha.post("/v1/choreo/sessions", json={"ttl_seconds": 60.5})
    assert limit_of(answer) == "session_ttl_seconds"
    used, ends = Session(alpha, ttl_seconds=60), []
    used.call(**prefill(3, save_as="kept"))
    for _ in range(3):  # each use begins the time anew
        assert used.message("kept").status_code == 200
        ends.append(alpha.get(used.path).json()["expires_at"])
        time.sleep(1.1)
    assert ends == sorted(set(ends))
    alpha.delete(used.path)
    session = Session(alpha, ttl_seconds=1)
    line = f'{{"event":"choreo.session.expired","session":"{session.id}"}}'
    while line not in server.log.read_text():  # to ask for it would be to use it
        time.sleep(0.1)
    assert error_of(alpha.get(session.path), 404)["type"] == "UnknownSessionError"
    others = [Session(alpha), Session(alpha)]  # there is room for
    for other in others:
        alpha.delete(other.path)


def test_sessions_in_use_stay_open(alpha: httpx.Client) -> None:
    session = Session(alpha, ttl_seconds=2)
    events = session.events(content="A", save_as="a", sampling_params=LONG)
    assert events[-1]["object"] == "choreo.message"
    assert events[-1]["metrics"]["latency"] > 2, "the call was too short to show anything"
    assert session.message("a").status_code == 200
    alpha.delete(session.path)


# -- what a session holds ------------------------------------------------------------------------


def test_messages_of_a_session(session: Session) -> None:
    session.call(calls=[prefill(3, save_as=name) for name in "abc"])
    calls = [prefill(3, save_as="d"), prefill(3, save_as="e")]
    refused = error_of(session.post({"calls": calls}), 429)
    assert refused["type"] == "LimitError" and "max_messages_per_session" in refused["message"]
    session.call(**prefill(3, save_as="d"))
    assert error_of(session.post(prefill(3)), 429)["type"] == "LimitError"
    session.client.delete(f"{session.path}/messages/a")
    session.call(**prefill(3, save_as="e"))
    assert session.usage()["messages"] == session.usage()["max_messages"] == 4


def test_tokens_of_a_session(session: Session) -> None:
    session.call(**prefill(600, save_as="long"))
    refused = error_of(session.post(prefill(401)), 429)
    assert refused["type"] == "LimitError" and "max_tokens_per_session" in refused["message"]
    session.client.delete(f"{session.path}/messages/long")
    session.call(**prefill(1000))
    assert session.usage()["tokens"] == session.usage()["max_tokens"] == 1000


def test_seconds_of_a_pin(session: Session) -> None:
    session.call(**prefill(3, save_as="a"))
    path = f"{session.path}/messages/a/pin"
    assert session.client.post(path).json()["ttl_seconds"] == 2
    assert limit_of(session.client.post(path, json={"ttl_seconds": 2.5})) == "max_pin_seconds"


# -- requests ------------------------------------------------------------------------------------


def test_calls_of_a_request(session: Session) -> None:
    calls = [prefill(1)] * 4
    assert limit_of(session.post({"calls": calls})) == "max_calls_per_request"
    assert len(session.call(calls=calls[:3])["data"]) == 3


def body_of(num_bytes: int) -> bytes:
    """A call as JSON of that many bytes."""
    call = {"type": "prefill", "content": [5]}
    return json.dumps(call).encode().ljust(num_bytes)


def chunks_of(body: bytes) -> Iterator[bytes]:
    """A body whose length is not told before."""
    for start in range(0, len(body), 4_000):
        yield body[start : start + 4_000]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bytes_of_a_request(session: Session, is_chunked: bool) -> None:
    def post(path: str, num_bytes: int) -> httpx.Response:
        body = body_of(num_bytes)
        return session.client.post(
            path,
            content=chunks_of(body) if is_chunked else body,
            headers={"Content-Type": "application/json"},
        )

    path = f"{session.path}/messages"
    assert post(path, 20_000).status_code == 200
    for num_bytes in (20_001, 300_000, 5_000_000):
        assert limit_of(post(path, num_bytes), 413) == "max_request_bytes"
    assert limit_of(post("/v1/choreo/sessions", 20_001), 413) == "max_request_bytes"
    assert post(path, 100).status_code == 200


# -- the page ------------------------------------------------------------------------------------


def test_page_of_a_session(session: Session) -> None:
    empty = session.client.get(f"{session.path}/page")
    assert empty.status_code == 200 and "no messages" in empty.text
    session.call(
        calls=[
            {"type": "prefill", "content": "</script><b>", "save_as": "shed"},
            {"content": "So", "parents": ["shed"], "save_as": "a", "sampling_params": GREEDY},
            {"content": "Or", "parents": ["a"], "save_as": "b", "sampling_params": GREEDY},
        ]
    )
    page = session.client.get(f"{session.path}/page")
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in page.text and "</script><b>" not in page.text
    data = page.text.partition('id="data">')[2].partition("</script>")[0]
    steps = json.loads(data)["problems"][0]["runs"][0]["steps"]
    assert [(step["author"], step["stage"]) for step in steps] == [
        *(("shed", "level 0"), ("a", "level 1"), ("b", "level 2"))
    ]
    assert steps[1]["parents"] == [[f"{session.id}/shed", None, None]]


# -- the end of the engine -----------------------------------------------------------------------


def test_nothing_is_saved_where_the_operator_does_not_allow_it(alpha: httpx.Client) -> None:
    session = Session(alpha)
    session.call(**prefill(3))
    for path in (f"{session.path}/save", f"{session.path}/load"):
        error = error_of(alpha.post(path, json={"name": "x"}), 400)
        assert "--choreo-keep" in error["message"]
    alpha.delete(session.path)


def test_the_engine_ends(server: Server, alpha: httpx.Client) -> None:
    """The last test: the server ends with its engine, and vLLM's supervisor would start both."""
    session = Session(alpha)
    answers: list[httpx.Response] = []

    def wait_for_a_call() -> None:
        with server.client(KEYS[0]) as client:
            body = {"content": "A", "sampling_params": {**LONG, "max_tokens": 500}}
            answers.append(client.post(f"{session.path}/messages", json=body))

    waiting = threading.Thread(target=wait_for_a_call)
    body = {"content": "B", "sampling_params": LONG, "stream": True}
    with alpha.stream("POST", f"{session.path}/messages", json=body) as stream:
        lines = stream.iter_lines()
        assert "choreo.message.chunk" in next(lines)
        waiting.start()
        while num_running(alpha) < 2:
            time.sleep(0.02)
        for process in engine_processes(server):
            os.kill(process, signal.SIGKILL)
        rest = [line for line in lines if line]
    waiting.join(30)
    assert error_of(answers[0], 503)["type"] == "EngineRestartedError"
    assert rest[-1] == "data: [DONE]"
    failed = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (failed["type"], failed["code"]) == ("EngineRestartedError", 503)
    with suppress(httpx.TransportError):  # the server is ending
        answer = session.post(prefill(1))
        assert error_of(answer, 503)["type"] == "EngineRestartedError"
    server.process.wait(30)


def engine_processes(server: Server) -> list[int]:
    """The children of the API server that run its engine."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [int(line.split()[0]) for line in lines if "EngineCore" in line]
    assert found, lines
    return found

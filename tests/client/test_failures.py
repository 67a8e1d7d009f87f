# SPDX-License-Identifier: Apache-2.0
"""The HTTP clients on a server that answers what the test says, and all that can go wrong.

`tests/server/test_client.py` and its neighbours have a real server.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.client.scripted_server import (
    SESSION,
    Answer,
    Script,
    answer,
    body_of,
    error,
    hang_up,
    stream,
)
from vllm_choreo import AsyncChoreoClient, ChoreoClient
from vllm_choreo.cli import main as cli
from vllm_choreo.client import ServerError
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    SpanError,
    TooLongError,
    UnknownMessageError,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.wire.messages import message_of


def message(name: str) -> Message:
    return message_of(body_of(name), 0.0)


@pytest.fixture
def script() -> Iterator[Script]:
    running = Script()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def c(script: Script) -> Iterator[ChoreoClient]:
    with ChoreoClient(script.url, "key", timeout=120.0) as client:
        yield client


def test_the_life_of_a_client(script: Script) -> None:
    script.answers = [
        answer(body_of("a")),
        answer({"object": "list", "data": [body_of("b"), body_of("c")], "usage": {}}),
        answer({"id": SESSION, "object": "choreo.session", "usage": {"messages": 3}}),
    ]
    before = time.perf_counter()
    with ChoreoClient(f"{script.url}/v1/", "key", "exact", ttl_seconds=60) as c:
        assert (c.session, c.mode) == (SESSION, "exact")
        made = c.prefill("text", save_as="a")
        assert before < made.metrics.submitted < time.perf_counter()
        assert [m.id for m in c.decode([{"header": "x"}, {"header": "y"}])] == [
            *(f"{SESSION}/b", f"{SESSION}/c")
        ]
        assert c.stats() == {"id": SESSION, "messages": 3}
    c.close()
    root = "/v1/choreo/sessions"
    assert script.requests == [
        ("POST", root, {"mode": "exact", "ttl_seconds": 60}),
        (
            *("POST", f"{root}/{SESSION}/messages"),
            {"type": "prefill", "content": "text", "save_as": "a"},
        ),
        (
            *("POST", f"{root}/{SESSION}/messages"),
            {"calls": [{"type": "decode", "content": x} for x in "xy"]},
        ),
        ("GET", f"{root}/{SESSION}", None),
        ("DELETE", f"{root}/{SESSION}", None),
    ]
    assert {headers["Authorization"] for headers in script.headers} == {"Bearer key"}
    with pytest.raises(FreedMessageError, match="closed"):
        c.prefill("more")
    assert len(script.requests) == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (error("UnknownMessageError", 404), UnknownMessageError),
        (error("NameTakenError", 409), NameTakenError),
        (error("LimitError", 429), LimitError),
        (error("LimitError", 413), LimitError),
        (error("EngineRestartedError", 503), EngineRestartedError),
        (error("SpanError", 400), SpanError),
    ],
)
def test_the_server_refuses_by_class(
    script: Script, c: ChoreoClient, given: Answer, expected: type[ChoreoError]
) -> None:
    script.answers = [given]
    with pytest.raises(expected, match=r"^so it is \(parents=x\)$") as refused:
        c.prefill("x")
    assert type(refused.value) is expected
    assert (refused.value.parameter, refused.value.value) == ("parents", "x")


def test_an_error_of_another_version_is_still_a_choreo_error(
    script: Script, c: ChoreoClient
) -> None:
    script.answers = [error("NewError", 400), error("BadRequestError", 400, param=None, value=None)]
    with pytest.raises(ChoreoError, match=r"^NewError: so it is \(parents=x\)$"):
        c.prefill("x")
    with pytest.raises(ChoreoError, match=r"^BadRequestError: so it is$"):
        c.prefill("x")


def test_a_list_of_which_one_fails_tells_what_each_came_to(script: Script, c: ChoreoClient) -> None:
    failed = {"message": "too long", "type": "TooLongError", "param": "parents", "value": "9"}
    data = [body_of("a"), {"object": "error", "error": failed}]
    script.answers = [answer({"object": "list", "data": data, "usage": {}})]
    with pytest.raises(TooLongError) as refused:
        c.prefill([{"tokens": "a"}, {"tokens": "b"}])
    made, error_again = refused.value.results
    assert made.id == f"{SESSION}/a" and error_again is refused.value


@pytest.mark.parametrize(
    ("given", "advice", "may_have_run"),
    [
        (answer({"error": "Unauthorized"}, 401), "api_key", False),
        (answer({"detail": "Not Found"}, 404), "--plugin choreo", False),
        (error("NotFoundError", 404), "--plugin choreo", False),
        (answer(b"<html>gateway</html>", 502), "502: <html>gateway</html>", True),
        (error("InternalServerError", 500), "500", True),
        (answer(b"loading", 503), "not ready", True),
        (answer(b"<html>welcome</html>", 200), "no server of vllm-choreo", False),
        (answer([], 200), "no server of vllm-choreo", False),
        (hang_up, "was not repeated", True),
    ],
)
def test_answers_that_are_none_name_the_server_and_the_way_out(
    script: Script, c: ChoreoClient, given: Answer, advice: str, may_have_run: bool
) -> None:
    script.answers = [given]
    num_before = len(script.requests)
    with pytest.raises(ServerError) as failed:
        c.decode("x")
    assert advice in str(failed.value) and script.url in str(failed.value)
    assert failed.value.may_have_run is may_have_run
    assert len(script.requests) == num_before + 1


def test_waiting_has_an_end(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        release.wait(60.0)

    script.answers = [wait]
    with ChoreoClient(script.url) as c:
        with monkeypatch.context() as patch:
            # For this request alone: a busy machine opens and closes a session when it comes to it.
            patch.setattr(c, "_endpoint", replace(c._endpoint, timeout=0.5))
            patch.setattr(c._http, "timeout", httpx.Timeout(0.5))
            with pytest.raises(
                ServerError, match=r"no answer within 0.5 s.*raise timeout"
            ) as failed:
                c.decode("x")
        assert failed.value.may_have_run
        again = pickle.loads(pickle.dumps(failed.value))
        assert again.may_have_run and str(again) == str(failed.value)
        release.set()
    assert [method for method, _, _ in script.requests] == ["POST", "POST", "DELETE"]


def test_nobody_is_there(script: Script) -> None:
    script.server.shutdown()
    script.server.server_close()
    with pytest.raises(ServerError, match=r"vllm serve MODEL --plugin choreo") as failed:
        ChoreoClient(script.url)
    assert not failed.value.may_have_run and script.url in str(failed.value)


def test_a_server_that_went_away_does_not_hide_what_went_wrong_first(script: Script) -> None:
    with pytest.raises(ZeroDivisionError), ChoreoClient(script.url):
        script.answers = [hang_up]
        raise ZeroDivisionError
    with pytest.raises(ServerError), ChoreoClient(script.url):
        script.answers = [hang_up]


def test_closing_what_is_closed_already(script: Script) -> None:
    with ChoreoClient(script.url) as c:
        script.answers = [error("UnknownSessionError", 404)]
    c.close()


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "ftp://localhost"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"base_url": None}, "base_url"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"mode": "fast"}, "mode"),
        ({"ttl_seconds": float("inf")}, "ttl_seconds"),
        ({"api_key": "with\nnewline"}, ""),
    ],
)
def test_arguments_that_make_no_client(arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ChoreoError) as refused:
        ChoreoClient(**{"base_url": "http://127.0.0.1:9", **arguments})
    assert refused.value.parameter == parameter


def test_a_policy_goes_with_each_call(script: Script, c: ChoreoClient) -> None:
    script.answers = [answer(body_of("a")) for _ in range(3)]
    public = c.deny("secret").deny(message("plan"))
    public.decode("x", deny=["more"])
    public.reencode("a")
    c.decode("y")
    denied = [body.get("deny") for _, path, body in script.requests if path.endswith("messages")]
    assert denied == [
        ["secret", f"{SESSION}/plan", "more"],
        ["secret", f"{SESSION}/plan"],
        None,
    ]


# -- the asynchronous client ---------------------------------------------------------------------


def chunk(text: str, index: int = 0) -> dict[str, Any]:
    tokens = [ord(letter) for letter in text]
    return {
        **{"object": "choreo.message.chunk", "index": index, "id": f"{SESSION}/a"},
        **{"text": text, "token_ids": tokens},
    }


def in_session(script: Script, program: Callable[[AsyncChoreoClient], Any]) -> None:
    async def main() -> None:
        async with AsyncChoreoClient(script.url, "key", timeout=120.0) as c:
            await program(c)

    asyncio.run(main())


def test_pieces_of_a_stream_make_up_the_message(script: Script) -> None:
    whole = body_of("a", "abcde", index=0, generated_text="bcde")
    whole["generated_token_ids"] = [98, 99, 100, 101]
    script.answers = [stream(chunk("bc"), chunk("d"), whole)]

    async def program(c: AsyncChoreoClient) -> None:
        pieces = [piece async for piece in c.stream_decode("a")]
        assert [piece.text for piece in pieces] == ["bc", "d", "e"]
        assert [piece.token_ids for piece in pieces] == [(98, 99), (100,), (101,)]
        assert [piece.message is None for piece in pieces] == [True, True, False]

    in_session(script, program)
    assert script.requests[1][2] == {
        "calls": [{"type": "decode", "content": "a"}],
        "stream": True,
    }


def test_a_stream_that_breaks_is_an_error(script: Script) -> None:
    script.answers = [stream(chunk("b"), done=False), stream(chunk("b"))]

    async def program(c: AsyncChoreoClient) -> None:
        for _ in range(2):
            texts = []
            with pytest.raises(ServerError, match="may have run") as failed:
                async for piece in c.stream_decode("a"):
                    texts.append(piece.text)
            assert texts == ["b"] and failed.value.may_have_run

    in_session(script, program)


def test_a_submitted_call_can_be_named_at_once(script: Script) -> None:
    held = threading.Event()
    first, second = (body_of(name, index=0) for name in ("mine", "other"))

    def accepted(handler: BaseHTTPRequestHandler) -> None:
        """Headers at once, the message when the child was asked for."""
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.flush()
        held.wait(60.0)
        handler.wfile.write(data)

    data = f"data: {json.dumps(first)}\n\ndata: [DONE]\n\n".encode()
    script.answers = [accepted, stream(second)]

    async def program(c: AsyncChoreoClient) -> None:
        parent = await c.submit(tokens="a", save_as="mine")
        assert parent.id == f"{SESSION}/mine"
        child = await c.submit(header="b", parents=[parent, (parent, 0, 1)])
        held.set()
        assert (await parent).id == f"{SESSION}/mine"
        assert child.id.startswith(f"{SESSION}/call-")
        assert (await child).text == "ab"

    in_session(script, program)
    sent = script.requests[2][2]["calls"][0]
    assert sent["parents"] == [
        f"{SESSION}/mine",
        {"id": f"{SESSION}/mine", "start": 0, "stop": 1},
    ]


def test_calls_of_one_request_settle_each_for_itself(script: Script) -> None:
    failed = {"message": "no", "type": "TooLongError", "param": "parents", "value": "9"}
    bad = {"object": "error", "index": 1, "error": failed}
    script.answers = [
        stream(chunk("x", 2), bad, body_of("c", index=2), body_of("a", index=0)),
        error("UnknownMessageError", 400),
    ]

    async def program(c: AsyncChoreoClient) -> None:
        calls = [{"tokens": "a", "save_as": "a"}, {"header": "b"}, {"copy_of": "a"}]
        first, second, third = await c.submit_all(calls)
        assert (await first).id == f"{SESSION}/a" and (await third).id == f"{SESSION}/c"
        with pytest.raises(TooLongError):
            await second
        assert isinstance(await second.result(), TooLongError)
        with pytest.raises(UnknownMessageError):
            await c.submit(header="x", parents=["nobody"])

    in_session(script, program)


def test_closing_ends_what_is_under_way(script: Script) -> None:
    release = threading.Event()

    def forever(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.flush()
        release.wait(60.0)
        handler.close_connection = True

    script.answers = [forever, forever]

    async def program(c: AsyncChoreoClient) -> None:
        running = await c.submit(header="a")
        unread = await c.submit(header="b")
        reader = asyncio.create_task(running.result())
        await asyncio.sleep(0)
        await c.close()
        with pytest.raises(ChoreoError, match="ended before"):
            await unread
        assert isinstance(await reader, ChoreoError)
        with pytest.raises(FreedMessageError):
            await c.stats()

    in_session(script, program)
    release.set()
    assert script.requests[-1][0] == "DELETE"


def test_a_session_is_opened_once_by_the_first_who_needs_it(script: Script) -> None:
    async def main() -> None:
        c = AsyncChoreoClient(script.url)
        with pytest.raises(ChoreoError, match="not open yet"):
            _ = c.session
        script.answers = [answer(body_of(name)) for name in "ab"]
        await asyncio.gather(c.prefill("a"), c.deny("x").prefill("b"))
        assert c.session == SESSION
        with pytest.raises(TypeError, match="parent"):
            await c.prefill("a", parent="b")
        await c.close()
        await c.close()
        await AsyncChoreoClient(script.url).close()

    asyncio.run(main())
    assert [method for method, _, _ in script.requests] == ["POST", "POST", "POST", "DELETE"]


# -- vllm-choreo run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--server", "http://a", "--model", "m"), "leave out --model"),
        (("--server", "http://a", "--max-model-len", "512"), "leave out --max-model-len"),
        (("--server", "http://a", "--replay", "t.json"), "leave out --server"),
        (("--api-key", "k"), "give --server, too"),
        (("--server", "a:8000"), "http://127.0.0.1:8000 (base_url=a:8000)"),
    ],
)
def test_options_that_do_not_go_with_a_server(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "direct", *arguments, "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())


# -- what it needs -------------------------------------------------------------------------------


def test_neither_vllm_nor_torch_is_needed(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None  # an import of them fails
from vllm_choreo import AsyncChoreoClient, ChoreoClient, ChoreoError
from vllm_choreo.cli.main import main
try:
    ChoreoClient("http://127.0.0.1:9")
except ChoreoError as error:
    assert "http://127.0.0.1:9" in str(error)
else:
    raise AssertionError
sys.exit(main(["run", "tree_of_thoughts", "--server", "http://127.0.0.1:9", "--out", sys.argv[1]]))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 1, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("vllm-choreo: no server can be reached")

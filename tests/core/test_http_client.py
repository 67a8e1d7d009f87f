# SPDX-License-Identifier: Apache-2.0
"""The HTTP clients up to the server: what they send, what they read, and what goes wrong between.

The other end is a socket that answers what the test says; `tests/server/test_client.py` has the
real one.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo import AsyncChoreoClient, ChoreoClient, cli
from vllm_choreo.client import Logprob, ServerError
from vllm_choreo.client.answers import Events, message_of
from vllm_choreo.client.calls import calls_of, each_call, evicting, freeing, pinning, unpinning
from vllm_choreo.client.sampling import sampling_fields
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    OffsetError,
    SpanError,
    TooLongError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.message import Message
from vllm_choreo.params import ParentSpan

SESSION = "5e55"


def body_of(name: str = "0", text: str = "ab", **changes: Any) -> dict[str, Any]:
    """A message object as the server answers it."""
    return {
        "id": f"{SESSION}/{name}",
        "object": "choreo.message",
        "created": 1_700_000_000,
        "session": SESSION,
        "type": "decode",
        "text": text,
        "token_ids": [ord(letter) for letter in text],
        "num_tokens": len(text),
        "position": 7,
        "parents": [{"id": f"{SESSION}/doc", "start": None, "stop": 3}],
        "generated_text": text[1:],
        "generated_token_ids": [ord(letter) for letter in text[1:]],
        "logprobs": None,
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 1,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 3},
            "exact": False,
            "reused_tokens": 3,
            "repositioned_tokens": 2,
            "encoded_tokens": 2,
        },
        "metrics": {"waiting": None, "ttft": 0.25, "latency": 0.5},
        "provenance": [f"{SESSION}/doc", f"{SESSION}/secret"],
        **changes,
    }


def message(name: str = "doc") -> Message:
    return message_of(body_of(name), 0.0)


def call(kind: str, tokens: Any, **shared: Any) -> dict[str, Any]:
    """The JSON of one call."""
    (only,), many = calls_of(kind, tokens, shared, ())
    assert not many
    return only


# -- what is sent --------------------------------------------------------------------------------


def test_what_is_not_given_is_not_sent() -> None:
    assert call("prefill", "text") == {"type": "prefill", "content": "text"}
    assert call("decode", (5, 6), parents=[], offsets=None, deny=()) == {
        "type": "decode",
        "content": [5, 6],
    }


def test_all_ways_to_name_a_parent() -> None:
    parents = [message(), "doc", f"{SESSION}/doc", (message(), 1, None), ("doc", None, 4)]
    sent = call("prefill", "x", parents=parents, offsets=range(5), new_offset=9, save_as="me")
    assert sent == {
        "type": "prefill",
        "content": "x",
        "parents": [
            *(f"{SESSION}/doc", "doc", f"{SESSION}/doc"),
            *({"id": f"{SESSION}/doc", "start": 1}, {"id": "doc", "stop": 4}),
        ],
        "offsets": [0, 1, 2, 3, 4],
        "new_offset": 9,
        "save_as": "me",
    }


def test_a_copy_names_the_message_or_its_part() -> None:
    assert call("prefill", None, copy_of=message())["copy_of"] == f"{SESSION}/doc"
    part = call("prefill", None, copy_of=(message(), 1, 2))
    assert part == {"type": "prefill", "copy_of": {"id": f"{SESSION}/doc", "start": 1, "stop": 2}}


def test_what_is_given_for_all_reaches_each_item_that_has_none() -> None:
    own = {"sampling_params": {"seed": 2}, "mode": "choreo"}
    items = [{"header": "a", "deny": ["late"]}, {"tokens": "b", **own}]
    shared = {"sampling_params": {"seed": 1}, "mode": "exact", "deny": ["early"]}
    sent, many = calls_of("decode", items, shared, ["always"])
    assert many and sent == [
        {
            "type": "decode",
            "content": "a",
            "mode": "exact",
            "deny": ["always", "early", "late"],
            "sampling_params": {"seed": 1},
        },
        {
            "type": "decode",
            "content": "b",
            "mode": "choreo",
            "deny": ["always", "early"],
            "sampling_params": {"seed": 2},
        },
    ]


def test_calls_of_both_kinds_tell_by_their_keys() -> None:
    sent = each_call([{"tokens": "a"}, {"header": "b"}, {"copy_of": "c"}], ["x"])
    assert [(item["type"], item["deny"]) for item in sent] == [
        ("prefill", ["x"]),
        ("decode", ["x"]),
        ("prefill", ["x"]),
    ]
    assert sent[2]["copy_of"] == "c" and "content" not in sent[2]


@pytest.mark.parametrize(
    ("tokens", "shared", "error", "parameter"),
    [
        (None, {}, ChoreoError, "header"),
        (7, {}, ChoreoError, "header"),
        (b"bytes", {}, ChoreoError, "header"),
        ([1, 2.0], {}, ChoreoError, "header"),
        ([1, True], {}, ChoreoError, "header"),
        ("x", {"parents": "doc"}, ChoreoError, "parents"),
        ("x", {"parents": message()}, ChoreoError, "parents"),
        ("x", {"parents": [3]}, ChoreoError, "parents"),
        ("x", {"parents": [("doc", 1)]}, ChoreoError, "parents"),
        ("x", {"parents": [("doc", 1.0, None)]}, SpanError, "parents"),
        ("x", {"parents": [("doc", True, None)]}, SpanError, "parents"),
        ("x", {"parents": [("doc", 3, 3)]}, SpanError, "parents"),
        ("x", {"parents": ["doc"], "offsets": [1.0]}, OffsetError, "offsets"),
        ("x", {"parents": ["doc"], "offsets": []}, OffsetError, "offsets"),
        ("x", {"parents": ["doc"], "offsets": 3}, OffsetError, "offsets"),
        ("x", {"new_offset": -1}, OffsetError, "new_offset"),
        ("x", {"deny": "doc"}, ChoreoError, "deny"),
        ("x", {"deny": [None]}, ChoreoError, "deny"),
        ("x", {"sampling_params": 3}, UnsupportedOptionError, "sampling_params"),
        ("x", {"sampling_params": {"temperature": float("nan")}}, ChoreoError, "temperature"),
        ("x", {"sampling_params": {"stop": {"a"}}}, UnsupportedOptionError, "stop"),
        ([{"header": "a"}], {"parents": ["doc"]}, ChoreoError, "parents"),
        ([{"header": "a"}, "b"], {}, ChoreoError, "tokens"),
        ([{"header": "a", "tokens": "b"}], {}, ChoreoError, "tokens"),
        ([{"header": "a", "parent": "b"}], {}, ChoreoError, "parent"),
        ([{"parents": ["doc"]}], {}, ChoreoError, "tokens"),
    ],
)
def test_what_is_refused_before_it_is_sent(
    tokens: Any, shared: dict[str, Any], error: type[ChoreoError], parameter: str
) -> None:
    with pytest.raises(error) as refused:
        calls_of("decode", tokens, shared, ())
    assert refused.value.parameter == parameter


def test_a_prefill_samples_nothing() -> None:
    with pytest.raises(UnsupportedOptionError, match="prefill samples nothing"):
        calls_of("prefill", [{"tokens": "a", "sampling_params": {"seed": 1}}], {}, ())


def test_where_messages_are() -> None:
    (request,) = freeing(SESSION, [f"{SESSION}/a"])
    assert (request.method, request.path) == ("DELETE", f"/v1/choreo/sessions/{SESSION}/messages/a")
    (request,) = evicting(SESSION, ["a"])
    assert (request.method, request.path[-8:]) == ("POST", "/a/evict")
    (request,) = pinning(SESSION, ["a"], 5.0)
    assert (request.method, request.body) == ("POST", b'{"ttl_seconds": 5.0}')
    (request,) = unpinning(SESSION, ["a"])
    assert (request.method, request.path[-6:]) == ("DELETE", "/a/pin")


@pytest.mark.parametrize("name", ["other/a", f"{SESSION}/", "", f"{SESSION}/a/b", "/a"])
def test_messages_of_others_are_unknown_without_asking(name: str) -> None:
    with pytest.raises(UnknownMessageError):
        freeing(SESSION, ["a", name])


@pytest.mark.parametrize("name", ["..", ".", "a b", "ä?#%"])
def test_a_name_is_never_a_way_to_something_else(name: str) -> None:
    (request,) = freeing(SESSION, [name])
    last = request.path.rpartition("/")[2]
    assert not set(last) & set("./?# ")


# -- sampling parameters -------------------------------------------------------------------------


def test_sampling_parameters_are_sent_by_what_is_not_the_default() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    assert sampling_fields(None) is None
    assert sampling_fields(SamplingParams()) == {}
    given = {"max_tokens": 5, "temperature": 0.5, "stop": ["x"], "logprobs": 2, "n": 2}
    assert sampling_fields(SamplingParams(**given)) == given
    assert sampling_fields(SamplingParams(output_kind=RequestOutputKind.DELTA)) == {}
    choice = StructuredOutputsParams(choice=["a", "b"])
    fields = sampling_fields(SamplingParams(structured_outputs=choice))
    assert fields is not None and fields["structured_outputs"]["choice"] == ["a", "b"]
    assert not any(name.startswith("_") for name in fields["structured_outputs"])
    assert sampling_fields({"seed": 3}) == {"seed": 3}


def test_sampling_parameters_survive_the_way() -> None:
    from vllm import SamplingParams

    given = SamplingParams(max_tokens=7, seed=3, top_k=5, stop="x", logit_bias={7: 1.5})
    fields = json.loads(json.dumps(sampling_fields(given)))
    fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    assert SamplingParams(**fields) == given


def test_no_limit_is_one_that_no_context_reaches() -> None:
    from vllm import SamplingParams

    assert sampling_fields(SamplingParams(max_tokens=None)) == {"max_tokens": 2**31 - 1}
    assert sampling_fields({"max_tokens": None}) == {"max_tokens": 2**31 - 1}


def test_options_that_cannot_be_sent_are_named() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    for name, value in (("detokenize", False), ("prompt_logprobs", 1), ("stream_interval", 4)):
        with pytest.raises(UnsupportedOptionError) as refused:
            sampling_fields(SamplingParams(**{name: value}))
        assert refused.value.parameter == name
    with pytest.raises(UnsupportedOptionError) as refused:
        sampling_fields(SamplingParams(extra_args={"mask": object()}))
    assert refused.value.parameter == "extra_args"
    with pytest.raises(UnsupportedOptionError, match="beam search"):
        sampling_fields(BeamSearchParams(beam_width=2, max_tokens=4))


# -- what is read --------------------------------------------------------------------------------


def test_a_message_is_made_again() -> None:
    entry = {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    made = message_of(body_of(logprobs=[entry]), submitted=3.0)
    assert (made.id, made.text, made.token_ids, made.num_tokens) == (
        f"{SESSION}/0",
        "ab",
        (97, 98),
        2,
    )
    assert made.parents == (ParentSpan(f"{SESSION}/doc", None, 3),)
    assert (made.generated_text, made.generated_token_ids) == ("b", (98,))
    assert made.logprobs == [{98: Logprob(-0.5, 1, "b")}]
    assert (made.position, made.finish_reason) == (7, "length")
    assert (made.usage.exact, made.usage.reused_tokens) == (False, 3)
    assert (made.metrics.submitted, made.metrics.waiting) == (3.0, None)
    assert (made.metrics.ttft, made.metrics.latency) == (0.25, 0.5)
    assert made.provenance == {f"{SESSION}/doc", f"{SESSION}/secret"}


def test_events_however_the_bytes_are_cut() -> None:
    # Ends of lines for Python, none for server-sent events.
    texts = ["a\u2028b", "\x85ä\x0b", "data: x"]
    stream = "".join(
        f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in texts
    )
    data = (": comment\n\n" + stream + "data: [DONE]\n\n").encode()
    for size in (1, 7, len(data)):
        events = Events()
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        assert [event["text"] for part in parts for event in events.feed(part)] == texts


# -- a server of a few lines ---------------------------------------------------------------------

Answer = Callable[[BaseHTTPRequestHandler], None]


class Script:
    """A server that answers the opening of sessions, and then what it is told.

    Attributes:
        answers: for the requests after the opening, in turn; then that something was deleted.
        requests: (method, path, body) of all requests.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[Any] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                script.requests.append((self.command, self.path, json.loads(body or b"null")))
                script.headers.append(self.headers)
                if self.command == "POST" and self.path.endswith("/sessions"):
                    write = answer({"id": SESSION, "object": "choreo.session"})
                else:
                    write = script.answers.pop(0) if script.answers else answer({"deleted": True})
                write(self)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def answer(body: Any, status: int = 200) -> Answer:
    """JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return write


def error(name: str, status: int, **changes: Any) -> Answer:
    body = {"message": "so it is", "type": name, "param": "parents", "value": "x", "code": status}
    return answer({"error": {**body, **changes}}, status)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def stream(*events: Any, done: bool = True) -> Answer:
    """Server-sent events; without `done` the connection breaks after them."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in [*map(json.dumps, events), *(["[DONE]"] if done else [])]:
            data = f"data: {event}\n\n".encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            handler.wfile.flush()
        if done:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = not done

    return write


@pytest.fixture
def script() -> Iterator[Script]:
    running = Script()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def c(script: Script) -> Iterator[ChoreoClient]:
    with ChoreoClient(script.url, "key", timeout=5.0) as client:
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


def test_waiting_has_an_end(script: Script) -> None:
    release = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        release.wait(5.0)

    script.answers = [wait]
    with ChoreoClient(script.url, timeout=0.2) as c:
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s.*raise timeout") as failed:
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
        async with AsyncChoreoClient(script.url, "key", timeout=5.0) as c:
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
        held.wait(5.0)
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
        release.wait(10.0)
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
from vllm_choreo.cli import main
try:
    ChoreoClient("http://127.0.0.1:9")
except ChoreoError as error:
    assert "http://127.0.0.1:9" in str(error)
else:
    raise AssertionError
sys.exit(main(["run", "tree_of_thoughts", "--server", "http://127.0.0.1:9", "--out", sys.argv[1]]))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("vllm-choreo: no server can be reached")

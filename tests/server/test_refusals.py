# SPDX-License-Identifier: Apache-2.0
"""What the server refuses, and how it says so: wrong types, nonsense, and bodies made to hurt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.serving import Session, cpu_seconds
from tests.server.test_routes import GREEDY, error_of
from vllm_choreo.testing.server import Server

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared(server: Any) -> Iterator[Session]:
    """A session with a message `known` of three tokens; refused calls leave it as it is."""
    with server.client() as client:
        session = Session(client)
        session.call(type="prefill", content=[1, 2, 3], save_as="known")
        yield session
        assert session.usage()["messages"] == 1
        client.delete(session.path)


def decode(**fields: Any) -> dict[str, Any]:
    return {"content": "x", **fields}


def sampling(**fields: Any) -> dict[str, Any]:
    return decode(sampling_params=fields)


# body, class of the error, its parameter, and its value ("": not checked)
REFUSED: list[tuple[Any, str, str, str | None]] = [
    ([], "ChoreoError", "body", "list of 0"),
    ("text", "ChoreoError", "body", "text"),
    (None, "ChoreoError", "body", None),
    ({}, "ChoreoError", "content", None),
    ({"content": 3}, "ChoreoError", "content", "3"),
    ({"content": True}, "ChoreoError", "content", "True"),
    ({"content": {"a": 1}}, "ChoreoError", "content", "dict of 1"),
    ({"content": ""}, "EmptyTokensError", "content", ""),
    ({"content": "", "type": "prefill"}, "EmptyTokensError", "content", ""),
    ({"content": []}, "EmptyTokensError", "content", "[]"),
    ({"content": [1, 2.0]}, "ChoreoError", "content.1", "2.0"),
    ({"content": [1, True]}, "ChoreoError", "content.1", "True"),
    ({"content": [-1]}, "ChoreoError", "content.0", "-1"),
    ({"content": [10**6]}, "ChoreoError", "content", "1000000"),
    ({"content": [10**30]}, "ChoreoError", "content.0", ""),
    ({"content": [5] * 3000}, "TooLongError", "content", None),
    ({"content": "word " * 40_000}, "TooLongError", "content", None),
    ({"content": "word " * 4_000}, "TooLongError", "parents", ""),
    (
        {"content": "x", "messages": [{"role": "user", "content": "x"}]},
        "ChoreoError",
        "content",
        "",
    ),
    ({"messages": []}, "ChoreoError", "messages", "list of 0"),
    ({"messages": [{"role": "user"}]}, "ChoreoError", "messages.0.content", None),
    ({"messages": [{"role": 1, "content": "x"}]}, "ChoreoError", "messages.0.role", "1"),
    ({"copy_of": "known"}, "ChoreoError", "type", "decode"),
    ({"copy_of": "nobody", "type": "prefill"}, "UnknownMessageError", "copy_of", ""),
    (decode(type="encode"), "ChoreoError", "type", "encode"),
    (decode(type=None), "ChoreoError", "type", None),
    (decode(header="y"), "ChoreoError", "header", "y"),
    (decode(name="y"), "ChoreoError", "name", "y"),
    (decode(temperature=1), "ChoreoError", "temperature", "1"),
    (decode(stream=1), "ChoreoError", "stream", "1"),
    (decode(mode="baseline"), "ChoreoError", "mode", "baseline"),
    (decode(parents="known"), "ChoreoError", "parents", "known"),
    (decode(parents={"id": "known"}), "ChoreoError", "parents", "dict of 1"),
    (decode(parents=[["known", 0, 1]]), "ChoreoError", "parents.0", "list of 3"),
    (decode(parents=[7]), "ChoreoError", "parents.0", "7"),
    (decode(parents=[None]), "ChoreoError", "parents.0", None),
    (decode(parents=[""]), "ChoreoError", "parents.0", ""),
    (decode(parents=["x" * 100_000]), "ChoreoError", "parents.0", "x" * 200 + "…"),
    (decode(parents=["nobody"]), "UnknownMessageError", "parents", ""),
    (decode(parents=["☃/❄"]), "UnknownMessageError", "parents", "☃/❄"),
    (decode(parents=["../known"]), "UnknownMessageError", "parents", "../known"),
    (decode(parents=[{"start": 0}]), "ChoreoError", "parents.0.id", None),
    (decode(parents=[{"id": "known", "end": 1}]), "ChoreoError", "parents.0.end", "1"),
    (decode(parents=[{"id": "known", "start": 0.0}]), "SpanError", "parents.0.start", "0.0"),
    (decode(parents=[{"id": "known", "start": -1}]), "SpanError", "parents.0.start", "-1"),
    (decode(parents=[{"id": "known", "stop": 4}]), "SpanError", "parents", ""),
    (decode(parents=[{"id": "known", "start": 2, "stop": 2}]), "SpanError", "parents", ""),
    (decode(parents=["known"], offsets=[1.0]), "OffsetError", "offsets.0", "1.0"),
    (decode(parents=["known"], offsets=[True]), "OffsetError", "offsets.0", "True"),
    (decode(parents=["known"], offsets=["1"]), "OffsetError", "offsets.0", "1"),
    (decode(parents=["known"], offsets=[-1]), "OffsetError", "offsets.0", "-1"),
    (decode(parents=["known"], offsets=[10**40]), "OffsetError", "offsets.0", ""),
    (decode(parents=["known"], offsets=[0, 0]), "OffsetError", "offsets", ""),
    (decode(parents=["known"], offsets=[2**31 - 1]), "OffsetError", "offsets", ""),
    (decode(new_offset=-1), "OffsetError", "new_offset", "-1"),
    (decode(new_offset=2**31), "OffsetError", "new_offset", "2147483648"),
    (decode(new_offset=3000), "OffsetError", "new_offset", "3000"),
    (decode(save_as="a/b"), "ChoreoError", "save_as", "a/b"),
    (decode(save_as="12"), "ChoreoError", "save_as", "12"),
    (decode(save_as=""), "ChoreoError", "save_as", ""),
    (decode(save_as="x" * 129), "ChoreoError", "save_as", "x" * 129),
    (decode(save_as="é"), "ChoreoError", "save_as", "é"),
    (decode(save_as=5), "ChoreoError", "save_as", "5"),
    (decode(save_as="me", parents=["me"]), "CyclicParentsError", "parents", ""),
    (decode(deny=["nobody"]), "UnknownMessageError", "deny", ""),
    (decode(deny="known"), "ChoreoError", "deny", "known"),
    (decode(sampling_params=[]), "ChoreoError", "sampling_params", "list of 0"),
    (sampling(max_token=1), "ChoreoError", "sampling_params.max_token", "1"),
    (sampling(max_tokens=0), "ChoreoError", "sampling_params.max_tokens", "0"),
    (sampling(max_tokens="1"), "ChoreoError", "sampling_params.max_tokens", "1"),
    (sampling(max_tokens=10**20), "ChoreoError", "sampling_params.max_tokens", ""),
    (sampling(temperature=-1), "ChoreoError", "sampling_params.temperature", "-1.0"),
    (sampling(temperature=True), "ChoreoError", "sampling_params.temperature", "True"),
    (sampling(top_p=2), "ChoreoError", "sampling_params.top_p", "2.0"),
    (sampling(logprobs=10_000), "ChoreoError", "sampling_params.logprobs", "10000"),
    (sampling(seed=2**64), "ChoreoError", "sampling_params.seed", ""),
    (sampling(logit_bias={"x": 1}), "ChoreoError", "sampling_params.logit_bias.x", "x"),
    (sampling(logit_bias={"999999999": 1}), "ChoreoError", "sampling_params.logit_bias", ""),
    (sampling(n=2), "UnsupportedOptionError", "sampling_params.n", "2"),
    (
        sampling(extra_args={"choreo": {"session": "other"}}),
        *("UnsupportedOptionError", "sampling_params.extra_args.choreo", None),
    ),
    (
        sampling(structured_outputs={"regex": "a", "_backend": "x"}),
        *("UnsupportedOptionError", "sampling_params.structured_outputs._backend", "x"),
    ),
    (
        {"type": "prefill", "content": "x", "sampling_params": {"max_tokens": 1}},
        *("UnsupportedOptionError", "sampling_params", ""),
    ),
    ({"calls": [decode(), decode(content="")]}, "EmptyTokensError", "content", ""),
    ({"calls": []}, "ChoreoError", "calls", "list of 0"),
    ({"calls": {}}, "ChoreoError", "calls", "dict of 0"),
    ({"calls": [decode(), decode(parent=[])]}, "ChoreoError", "calls.1.parent", "list of 0"),
    ({"calls": [decode(stream=True)]}, "ChoreoError", "calls.0.stream", "True"),
    ({"calls": [decode()], "content": "x"}, "ChoreoError", "content", "x"),
    ({"calls": [decode(), 3]}, "ChoreoError", "calls.1", "3"),
]


@pytest.mark.parametrize(
    ("body", "kind", "parameter", "value"),
    REFUSED,
    ids=[json.dumps(body)[:50] for body, *_ in REFUSED],
)
def test_refused_bodies(
    shared: Session, body: Any, kind: str, parameter: str, value: str | None
) -> None:
    error = error_of(shared.post(body), 400)
    assert (error["type"], error["param"]) == (kind, parameter), error
    if value != "":
        assert error["value"] == value
    assert 0 < len(error["message"]) < 500


NOT_JSON = {
    "empty": b"",
    "no JSON": b"hello",
    "cut": b'{"content": "x"',
    "NaN": b'{"content": "x", "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"content": "x", "sampling_params": {"temperature": 1e999}}',
    "half a pair": b'{"content": "\\ud800"}',
    "half a pair as a name": b'{"\\udfff": 1}',
    "no UTF-8": b'{"content": "\xff\xfe"}',
    "deep list": b"[" * 100_000,
    "deep object": b'{"content":' * 50_000,
    "deep and closed": b'{"content":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "huge number": b'{"new_offset": ' + b"9" * 100_000 + b"}",
    "null bytes": b"\x00" * 1000,
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json(shared: Session, content: bytes) -> None:
    answer = shared.client.post(f"{shared.path}/messages", content=content, headers=JSON)
    error = error_of(answer, 400)
    assert error["type"] == "ChoreoError" and len(answer.content) < 1000


TWICE = {
    "at the top": (b'{"content": "x", "content": "y"}', '"content" stands twice'),
    "the same value": (b'{"content": "x", "content": "x"}', "at line 1 column"),
    "written differently": (b'{"content": "x", "\\u0063ontent": "y"}', '"content"'),
    "inside": (b'{"content": "x",\n "sampling_params": {"n": 1, "n": 1}}', "line 2 column 34"),
    "in a list": (b'{"calls": [{}, {"parents": [{"id": "a", "id": "b"}]}]}', '"id"'),
    "in what is dropped": (b'{"content": {"n": 1, "n": 1}, "content": "x"}', '"n"'),
    "empty": (b'{"content": "x", "": 1, "": 2}', '""'),
    "unknown": (b'{"%b": 1, "%b": 2}' % (b"n" * 1000, b"n" * 1000), "n" * 50),
    "behind a line": (b'{"a\\nb": 1, "a\\nb": 2}', "stands twice"),
}


@pytest.mark.parametrize(("content", "told"), TWICE.values(), ids=TWICE)
def test_a_key_that_stands_twice(shared: Session, content: bytes, told: str) -> None:
    """Two readers of such a body may differ in what it says."""
    answer = shared.client.post(f"{shared.path}/messages", content=content, headers=JSON)
    error = error_of(answer, 400)
    assert (error["type"], error["param"]) == ("ChoreoError", "body"), error
    assert told in error["message"] and "stands twice" in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("path", ["/v1/choreo/sessions", "/messages/known/pin"])
def test_a_key_that_stands_twice_in_other_bodies(shared: Session, path: str) -> None:
    path = path if path.startswith("/v1") else shared.path + path
    content = b'{"ttl_seconds": 1, "ttl_seconds": 2}'
    answer = shared.client.post(path, content=content, headers=JSON)
    assert "ttl_seconds" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_types_of_content(shared: Session, content_type: str) -> None:
    answer = shared.client.post(
        f"{shared.path}/messages", content=b"{}", headers={"Content-Type": content_type}
    )
    error = error_of(answer, 400)
    assert (error["param"], error["value"]) == ("Content-Type", content_type)


MANY = 1_000_000
# Made when they are sent.
A_MILLION: dict[str, Callable[[], Any]] = {
    "parents": lambda: decode(parents=["known"] * MANY),
    "parents unknown": lambda: decode(parents=["nobody"] * 50_000),
    "parents just allowed": lambda: decode(parents=["known"] * 99_999),
    "parents by number": lambda: decode(parents=[7] * MANY),
    "offsets": lambda: decode(offsets=[0] * MANY),
    "denied": lambda: decode(deny=["known"] * MANY),
    "parents of calls": lambda: {"calls": [decode(parents=["known"] * 1000)] * 1000},
    "parents that are objects": lambda: {"calls": [decode(parents=[{"id": 1}] * 1000)] * 1000},
    "calls": lambda: {"calls": [{}] * MANY},
    "fields of calls": lambda: {"calls": [{f"field{i}": i for i in range(900)}] * 1000},
    "tokens": lambda: {"content": [1] * MANY},
    "texts": lambda: {"content": ["a"] * MANY},
    "letters of a field": lambda: {"x" * MANY: 1},
    "fields": lambda: {f"f{i}": i for i in range(MANY // 2)},
    "options": lambda: sampling(**{f"f{i}": i for i in range(MANY // 2)}),
    "letters of a name": lambda: decode(save_as="x" * MANY),
    "stop strings": lambda: sampling(stop=["x"] * MANY),
    "biases": lambda: sampling(logit_bias={str(i): 0 for i in range(MANY)}),
    "turns": lambda: {"messages": [{"role": "user", "content": "x"}] * 300_000},
}


@pytest.mark.parametrize("what", A_MILLION)
def test_a_million_of_anything_is_refused_soon(shared: Session, server: Server, what: str) -> None:
    content = json.dumps(A_MILLION[what]()).encode()
    before = cpu_seconds(server)
    answer = shared.client.post(f"{shared.path}/messages", content=content, headers=JSON)
    seconds = cpu_seconds(server) - before
    assert answer.status_code in (400, 429) and len(answer.content) < 2000, answer.text[:2000]
    assert seconds < 5


def test_long_texts_do_not_stop_the_server(shared: Session, server: Any) -> None:
    """Megabytes that are tokenised before they are refused: others are answered meanwhile."""
    calls = [decode(content=f"{i} " + "word " * 3000) for i in range(200)]
    content = json.dumps({"calls": calls}).encode()
    assert len(content) > 3e6
    # One client: to make one for each question takes longer than the answer.
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.base_url) as other:
        running = pool.submit(
            shared.client.post, f"{shared.path}/messages", content=content, headers=JSON
        )
        num_answered = 0
        while not running.done():
            assert other.get("/health").status_code == 200
            num_answered += 1
    assert error_of(running.result(), 400)["type"] == "TooLongError"
    assert num_answered > 5, "one of them waited for most of it"


@pytest.mark.parametrize("name", ["%ff", "%00", "a%2Fb", "..%2F..", "%E2%98%83", "x" * 10_000, "%"])
@pytest.mark.parametrize("route", ["GET ", "DELETE ", "POST /evict", "POST /pin", "DELETE /pin"])
def test_odd_names_in_paths(shared: Session, route: str, name: str) -> None:
    method, _, action = route.partition(" ")
    answer = shared.client.request(method, f"{shared.path}/messages/{name}{action}")
    assert answer.status_code in (400, 404, 405), answer.text


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"mode": "fast"}, "mode"),
        ({"mode": None}, "mode"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"ttl_seconds": True}, "ttl_seconds"),
        ({"ttl_seconds": "60"}, "ttl_seconds"),
        ({"ttl": 60}, "ttl"),
        ([], "body"),
    ],
)
def test_refused_sessions(shared: Session, body: Any, parameter: str) -> None:
    answer = shared.client.post("/v1/choreo/sessions", json=body)
    assert error_of(answer, 400)["param"] == parameter


def test_other_methods(shared: Session) -> None:
    for method, path in (
        ("PUT", shared.path),
        ("PATCH", f"{shared.path}/messages"),
        ("GET", "/v1/choreo/sessions"),
        ("PUT", f"{shared.path}/messages/known"),
    ):
        assert shared.client.request(method, path).status_code == 405
    assert shared.client.get("/v1/choreo/nothing").status_code == 404


def test_the_server_is_well_after_all_this(shared: Session) -> None:
    made = shared.call(content="So", parents=["known"], save_as="x", sampling_params=GREEDY)
    assert made["usage"]["completion_tokens"] == 6
    assert shared.client.delete(f"{shared.path}/messages/x").status_code == 200

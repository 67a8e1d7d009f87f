# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one server: what is of one does not exist for the other."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
from typing import Any

import httpx
import pytest

from tests.server.serving import Session
from tests.server.test_routes import GREEDY, SHED, error_of
from vllm_choreo.testing.server import KEYS, Server

# Every route of a session: method, what follows the session's path, and a legal body.
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("DELETE", "", None),
    ("POST", "/messages", {"content": "x", "parents": ["secret"]}),
    ("POST", "/messages", {"content": "x", "stream": True}),
    ("POST", "/messages", {"calls": [{"type": "prefill", "content": "x"}]}),
    ("POST", "/messages", {"calls": [{"type": "prefill", "content": "x"}], "stream": True}),
    ("POST", "/messages", {"content": "x", "no such field": 1}),
    ("GET", "/messages", None),
    ("GET", "/messages/secret", None),
    ("GET", "/messages/nobody", None),
    ("GET", "/messages/secret/provenance", None),
    *(
        ("POST", f"/messages/{name}", {"messages": ["secret"]})
        for name in ("free", "evict", "pin", "unpin")
    ),
    ("DELETE", "/messages/secret", None),
    ("POST", "/messages/secret/evict", None),
    ("POST", "/messages/secret/pin", {"ttl_seconds": 5}),
    ("POST", "/messages/secret/pin", {"ttl_seconds": -5}),
    ("DELETE", "/messages/secret/pin", None),
    ("GET", "/page", None),
    ("GET", "/blocks", None),
]
IDS = [f"{method} {path} {body or ''}"[:60] for method, path, body in ROUTES]


@pytest.fixture(scope="module")
def secret(server: Server) -> Any:
    """A session of the first tenant with a message `secret`, which nobody may touch."""
    with server.client(KEYS[0]) as client:
        session = Session(client)
        session.call(type="prefill", content=SHED, save_as="secret")
        before = session.message("secret").content
        yield session
        assert session.message("secret").content == before
        assert session.usage()["messages"] == 1 and session.usage()["pinned_messages"] == 0
        client.delete(session.path)


def whole(answer: httpx.Response) -> tuple[Any, ...]:
    """All of an answer that a client sees, but the time."""
    headers = sorted((name, value) for name, value in answer.headers.items() if name != "date")
    return answer.status_code, headers, answer.content


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=IDS)
def test_a_foreign_session_is_an_unknown_one(
    secret: Session, beta: httpx.Client, method: str, path: str, body: Any
) -> None:
    def ask(session_id: str) -> httpx.Response:
        return beta.request(method, f"/v1/choreo/sessions/{session_id}{path}", json=body)

    foreign, unknown = ask(secret.id), ask(secrets.token_hex(16))
    assert whole(foreign) == whole(unknown)
    assert error_of(foreign, 404)["type"] == "UnknownSessionError"
    assert whole(ask("not-even-hexadecimal")) == whole(foreign)


@pytest.mark.parametrize("field", ["parents", "deny", "copy_of"])
def test_a_foreign_message_is_an_unknown_one(
    secret: Session, beta: httpx.Client, field: str
) -> None:
    session = Session(beta)

    def ask(owner: str) -> dict[str, Any]:
        name = f"{owner}/secret"
        call = {"type": "prefill", "content": "x", field: [name]}
        if field == "copy_of":
            call = {"type": "prefill", field: name}
        error = error_of(session.post(call), 400)
        assert error.pop("value") == name
        return error

    assert ask(secret.id) == ask(secrets.token_hex(16))
    assert ask(secret.id)["type"] == "UnknownMessageError"
    beta.delete(session.path)


def test_names_are_of_a_session(secret: Session, beta: httpx.Client) -> None:
    session = Session(beta)
    own = session.call(type="prefill", content="mine", save_as="secret")
    assert own["id"] == f"{session.id}/secret" and own["text"] == "mine"
    beta.delete(session.path)


def test_identical_messages_are_shared_inside_a_tenant_alone(
    alpha: httpx.Client, beta: httpx.Client
) -> None:
    text = f"{secrets.token_hex(64)}\n" * 2  # that nobody encoded before
    call = {"type": "prefill", "content": text}

    def num_encoded(session: Session) -> int:
        usage = session.call(**call)["usage"]
        assert usage["encoded_tokens"] + usage["reused_tokens"] == usage["total_tokens"]
        encoded: int = usage["encoded_tokens"]
        return encoded

    first, other = Session(alpha), Session(beta)
    all_tokens = num_encoded(first)
    assert num_encoded(other) == all_tokens > 64
    # Whole blocks are shared; the last one is encoded again.
    assert num_encoded(Session(alpha)) <= 32
    assert num_encoded(first) <= 32
    assert num_encoded(Session(beta)) <= 32
    for session in (first, other):
        session.client.delete(session.path)


def test_ids_tell_nothing(alpha: httpx.Client) -> None:
    sessions = [Session(alpha) for _ in range(5)]
    ids = [session.id for session in sessions]
    assert len(set(ids)) == 5
    assert all(len(bytes.fromhex(session_id)) == 16 for session_id in ids)
    for session in sessions:
        alpha.delete(session.path)


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=IDS)
@pytest.mark.parametrize("header", [None, "Bearer gamma", "Bearer", "Basic alpha", "alpha"])
def test_no_key_no_answer(
    server: Server, secret: Session, header: str | None, method: str, path: str, body: Any
) -> None:
    headers = {} if header is None else {"Authorization": header}
    for url in (f"{secret.path}{path}", "/v1/choreo/sessions"):
        answer = httpx.request(method, f"{server.base_url}{url}", json=body, headers=headers)
        assert answer.status_code == 401, (url, answer.text)


def test_a_key_with_another_scheme_in_front_is_the_same_tenant(
    server: Server, secret: Session
) -> None:
    answer = httpx.get(
        f"{server.base_url}{secret.path}", headers={"Authorization": f"bEARER {KEYS[0]}"}
    )
    assert answer.status_code == 200


def test_a_key_that_is_a_prefix_is_no_key(server: Server) -> None:
    with server.client("alph") as client:
        assert client.post("/v1/choreo/sessions").status_code == 401


def test_of_two_keys_the_first_counts(alpha: httpx.Client, beta: httpx.Client) -> None:
    """For vLLM, which lets a request in, and for us, who say whose it is."""
    both = [("Authorization", f"Bearer {key}") for key in KEYS]
    answer = httpx.post(f"{alpha.base_url}/v1/choreo/sessions", headers=both)
    path = f"/v1/choreo/sessions/{answer.json()['id']}"
    assert beta.delete(path).status_code == 404
    assert alpha.delete(path).status_code == 200


# -- routes that vLLM opens to everybody ---------------------------------------------------------

INVENTED = [None, "Bearer gamma", "Bearer", "Basic alpha"]


@pytest.mark.parametrize("header", INVENTED)
def test_no_key_no_session_by_any_route(server: Server, header: str | None) -> None:
    """/invocations serves completions to whoever reaches the port: ordinary ones alone."""
    before = num_sessions(server)
    headers = {} if header is None else {"Authorization": header}
    body = {"model": server.model, "prompt": [5, 6], "max_tokens": 1}
    url = f"{server.base_url}/invocations"
    for xargs in ({"choreo_save_as": "n"}, {"choreo_auto": "exact"}):
        sent = {**body, "prompt": [[5], [6]]} if "choreo_auto" in xargs else body
        answer = httpx.post(url, headers=headers, json={**sent, "vllm_xargs": xargs})
        assert error_of(answer, 401)["type"] == "UnknownKeyError"
    assert httpx.post(url, headers=headers, json=body).status_code == 200
    assert num_sessions(server) == before


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/choreo/sessions", "/V1/choreo/sessions", "/v1%2Fchoreo/sessions"),
        *("/./v1/choreo/sessions", "/foo/../v1/choreo/sessions", "/%76%31/choreo/sessions"),
        *("/v1/choreo/sessions/", "/v1/./choreo/sessions", "/v1/choreo/sessions?x=/health"),
    ],
)
def test_no_spelling_of_a_path_opens_a_session_without_a_key(server: Server, path: str) -> None:
    """Sent as it is written: httpx would write it anew."""
    before = num_sessions(server)
    host, _, port = server.base_url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", path, skip_accept_encoding=True)
        connection.putheader("Content-Length", "2")
        connection.endheaders(b"{}")
        assert connection.getresponse().status in (307, 401, 404)
    assert num_sessions(server) == before


def test_a_key_is_the_same_tenant_on_every_route(alpha: httpx.Client, server: Server) -> None:
    session = Session(alpha)
    xargs = {"choreo_session": session.id, "choreo_save_as": "made"}
    body = {"model": server.model, "prompt": [5, 6], "max_tokens": 1, "vllm_xargs": xargs}
    assert alpha.post("/invocations", json=body).status_code == 200
    assert session.message("made").status_code == 200
    alpha.delete(session.path)


def num_sessions(server: Server) -> float:
    page = httpx.get(f"{server.base_url}/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("vllm_choreo:num_sessions{")]
    return float(line.split()[-1])


# -- what vLLM's prefix cache tells --------------------------------------------------------------


def completion(client: httpx.Client, prompt: list[int], **fields: Any) -> int:
    """How many of a prompt's tokens the answer says were cached."""
    body = {"model": "smollm", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return (details or {}).get("cached_tokens") or 0


def with_salt(client: httpx.Client, prompt: list[int]) -> int:
    return completion(client, prompt, cache_salt="mine")


def invocation(client: httpx.Client, prompt: list[int]) -> int:
    body = {"model": "smollm", "prompt": prompt, "max_tokens": 1}
    usage = client.post("/invocations", json=body).json()["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def baseline_call(client: httpx.Client, prompt: list[int]) -> int:
    session = Session(client, mode="baseline")
    made = session.call(content=prompt, sampling_params=GREEDY)
    client.delete(session.path)
    reused: int = made["usage"]["reused_tokens"]
    return reused


@pytest.mark.parametrize("send", [completion, with_salt, invocation, baseline_call])
def test_no_tenant_finds_in_the_prefix_cache_what_another_has_sent(
    alpha: httpx.Client, beta: httpx.Client, send: Any
) -> None:
    prompt = [5 + token for token in secrets.token_bytes(200)]
    assert send(alpha, prompt) == 0
    assert send(beta, prompt) == 0
    assert completion(beta, prompt, cache_salt="other") == 0
    assert send(alpha, prompt) >= 160, "its own, it finds"
    assert send(beta, prompt) >= 160


def test_several_answers_to_one_prompt_are_salted_too(
    alpha: httpx.Client, beta: httpx.Client
) -> None:
    prompt = [5 + token for token in secrets.token_bytes(200)]
    completion(alpha, prompt, n=2, temperature=1.0)
    assert completion(beta, prompt) == 0
    assert completion(alpha, prompt) >= 160


def test_a_baseline_session_shares_with_ordinary_requests_of_its_key(
    alpha: httpx.Client, beta: httpx.Client
) -> None:
    prompt = [5 + token for token in secrets.token_bytes(200)]
    assert completion(alpha, prompt) == 0
    assert baseline_call(beta, prompt) == 0
    assert baseline_call(alpha, prompt) >= 160


def test_no_salt_reaches_what_another_tenant_has_sent(
    alpha: httpx.Client, beta: httpx.Client, server: Server
) -> None:
    """Also not the name by which the engine and the log know it."""
    prompt = [5 + token for token in secrets.token_bytes(200)]
    completion(alpha, prompt)
    with server.client(None) as nobody:
        assert invocation(nobody, prompt) == 0
    for salt in (*KEYS, f"Bearer {KEYS[0]}"):
        assert completion(beta, prompt, cache_salt=salt) == 0


# -- two requests of one id ----------------------------------------------------------------------


@pytest.mark.parametrize("xargs", [None, {"choreo_mode": "choreo"}])
def test_one_request_id_is_two_requests(
    alpha: httpx.Client, beta: httpx.Client, xargs: dict[str, str] | None
) -> None:
    """Who hangs up ends none of another tenant's, whatever both call themselves."""
    same = {"X-Request-Id": secrets.token_hex(8)}
    body = {"model": "smollm", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": 100} | ({"vllm_xargs": xargs} if xargs else {})
    alone = beta.post("/v1/completions", json=body).json()["choices"][0]["text"]
    other = {**body, "prompt": [9, 9, 9], "stream": True}
    with beta.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=same
    ) as mine:
        lines = mine.iter_lines()
        begun = next(line for line in lines if line)
        for _ in range(3):
            with alpha.stream("POST", "/v1/completions", json=other, headers=same) as theirs:
                assert next(theirs.iter_lines())
        rest = [line for line in lines if line]
    events = [json.loads(line[6:]) for line in [begun, *rest[:-1]]]
    assert rest[-1] == "data: [DONE]"
    assert "".join(c["text"] for event in events for c in event["choices"]) == alone


def test_closing_frees_for_the_tenant_alone(alpha: httpx.Client, beta: httpx.Client) -> None:
    mine, theirs = Session(alpha), Session(beta)
    theirs.call(content="A", sampling_params=GREEDY, save_as="a")
    alpha.delete(mine.path)
    assert theirs.message("a").status_code == 200
    assert theirs.usage()["resident_tokens"] > 0
    beta.delete(theirs.path)

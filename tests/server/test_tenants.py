# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one server: what is of one does not exist for the other."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from benchmarks.harness.serving import KEYS, Server
from tests.server.serving import Session
from tests.server.test_routes import GREEDY, SHED, error_of

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


def test_closing_frees_for_the_tenant_alone(alpha: httpx.Client, beta: httpx.Client) -> None:
    mine, theirs = Session(alpha), Session(beta)
    theirs.call(content="A", sampling_params=GREEDY, save_as="a")
    alpha.delete(mine.path)
    assert theirs.message("a").status_code == 200
    assert theirs.usage()["resident_tokens"] > 0
    beta.delete(theirs.path)

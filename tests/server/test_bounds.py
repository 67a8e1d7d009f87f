# SPDX-License-Identifier: Apache-2.0
"""One tenant sends what is much work; another one is served as if nothing were."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.serving import Session, cpu_seconds
from tests.server.test_routes import GREEDY, error_of
from vllm_choreo.testing.server import KEYS, MODEL_NAME, Server

_NUM_SAMPLES = 100
# What the server may work, for anybody, while one request waits, as a multiple of what this machine
# needs to count to a million (measured: 0.06 s, on a slow one): Python's threads take turns of
# milliseconds, and without bounds the bodies below take seconds to minutes each.
_MAX_WORKED = 16


def _pieces(count: int, more: str = "") -> str:
    modules = "".join(f'a <module name="m{i}">b</module>' for i in range(count))
    return f'<schema name="pieces">{modules}{more}</schema>'


def _prompt(text: str) -> dict[str, Any]:
    return {"prompt": text, "sampling_params": GREEDY}


def _completion(prompt: Any, **xargs: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "vllm_xargs": xargs}


_SCAFFOLDS = "".join(f'<scaffold modules="m{2 * i} m{2 * i + 1}"/>' for i in range(3))
_INDENTED = f'<prompt schema="bounds"><m/>a\n{" " * 900_000}b\nc</prompt>'
_TURNS = "<user>a</user><assistant>b</assistant>" * 400
# The route, the body, and what the error says that it is answered with; None: any answer.
ATTACKS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "indentation": ("/v1/choreo/prompts", _prompt(_INDENTED), "do not fit into the context"),
    "indentation of a completion": (
        "/v1/completions",
        _completion(_INDENTED, choreo_schema="bounds"),
        "do not fit into the context",
    ),
    "scaffolds": (
        "/v1/choreo/schemas",
        {"markup": _pieces(999, _SCAFFOLDS), "encode": True},
        "pieces that its pieces read",
    ),
    "nested prompts": (
        "/v1/choreo/prompts",
        _prompt('<prompt schema="pieces">' + '<prompt schema="pieces"/>' * 400 + "a</prompt>"),
        "goes through 20000 pieces",
    ),
    "parts": (
        "/v1/completions",
        _completion(["a b c d " * 500_000, "a"], choreo_auto="exact"),
        "do not fit into a context",
    ),
    "turns": (
        "/v1/choreo/schemas",
        {"markup": f'<schema name="turns">{_TURNS}</schema>'},
        None,
    ),
    "choices": (
        "messages",
        {
            "content": "a",
            "sampling_params": {"structured_outputs": {"choice": [f"c{i}" for i in range(50_000)]}},
        },
        "characters as JSON",
    ),
    "text": ("messages", {"calls": [{"type": "prefill", "content": "a b c d " * 900}] * 30}, None),
}


@pytest.fixture(scope="module")
def attacker(server: Server) -> Iterator[Session]:
    """A session of the first tenant, which has two schemas."""
    with server.client(KEYS[0], timeout=300.0) as client:
        session = Session(client)
        for markup in ('<schema name="bounds"><module name="m">a</module></schema>', _pieces(999)):
            answer = client.post("/v1/choreo/schemas", json={"markup": markup})
            assert answer.status_code == 200, answer.text
        yield session
        for name in ("bounds", "pieces"):
            client.delete(f"/v1/choreo/schemas/{name}")
        client.delete(session.path)


def _send(session: Session, attack: str) -> httpx.Response:
    route, body, _ = ATTACKS[attack]
    return session.client.post(
        f"{session.path}/messages" if route == "messages" else route, json=body
    )


@contextmanager
def _sending(send: Callable[[], Any], num_senders: int) -> Iterator[Callable[[], int]]:
    """Send again and again meanwhile; tells how often that was answered."""
    over, count = threading.Event(), [0]

    def go_on() -> None:
        while not over.is_set():
            send()
            count[0] += 1

    threads = [threading.Thread(target=go_on) for _ in range(num_senders)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: count[0]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _work_during_requests(session: Session, server: Server) -> list[float]:
    """What the server worked, in seconds of a processor, while each of some requests waited.

    A clock would tell how busy the machine is, too. They are for a route that does nothing; between
    them are calls of a few words, for which the engine's steps are waited for.
    """
    worked = []
    for _ in range(_NUM_SAMPLES):
        start = cpu_seconds(server)
        assert session.client.get("/v1/models").status_code == 200
        worked.append(cpu_seconds(server) - start)
        session.call(type="prefill", content="a few words")
    return worked


def _seconds_to_count() -> float:
    """What it takes to count to a million here and now, in seconds of a processor."""
    start = time.thread_time()
    for _ in range(1_000_000):
        pass
    return time.thread_time() - start


@pytest.mark.exhaustive
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_tenant_that_sends_much_work_is_not_felt_by_others(
    attacker: Session, beta: httpx.Client, server: Server, attack: str
) -> None:
    innocent = Session(beta)
    with _sending(lambda: _send(attacker, attack), 3) as num_answered:
        while not num_answered():
            time.sleep(0.01)  # the first of each kind reads what is imported when it is needed
        worked = _work_during_requests(innocent, server)
        counted = _seconds_to_count()
    beta.delete(innocent.path)
    assert num_answered() > 1
    assert sorted(worked)[-2] <= _MAX_WORKED * counted, (counted, worked)


@pytest.mark.parametrize("attack", [name for name, (*_, text) in ATTACKS.items() if text])
def test_what_is_too_much_is_refused_at_once(
    attacker: Session, server: Server, attack: str
) -> None:
    text = ATTACKS[attack][2]
    before = cpu_seconds(server)
    answer = _send(attacker, attack)
    assert answer.status_code in (400, 413, 429), answer.text
    error = error_of(answer, answer.status_code)
    assert text is not None and text in error["message"]
    assert len(answer.content) < 2_000, "an error does not repeat what was sent"
    assert cpu_seconds(server) - before < 20


def test_denied_messages_are_counted_together(attacker: Session) -> None:
    calls = [{"type": "prefill", "content": [5], "deny": ["x"] * 1_000}] * 101
    error = error_of(attacker.post({"calls": calls}), 429)
    assert (error["type"], error["param"]) == ("LimitError", "deny")


def test_strings_and_names_are_counted_before_they_are_read(attacker: Session) -> None:
    fields = ",".join(f'"{number}":1' for number in range(600_000))
    answer = attacker.client.post(
        f"{attacker.path}/messages",
        content=f"{{{fields}}}".encode(),
        headers={"Content-Type": "application/json"},
    )
    assert "strings and names" in error_of(answer, 429)["message"]


def test_a_choreographed_completion_is_as_long_as_any_request(attacker: Session) -> None:
    for xargs in ({"choreo_auto": "exact"}, {"choreo_mode": "choreo"}):
        body = _completion(["a", "a" * (17 * 2**20)], **xargs)
        if "choreo_mode" in xargs:
            body["prompt"], body["user"] = "a", "a" * (17 * 2**20)
        answer = attacker.client.post("/v1/completions", json=body)
        error = error_of(answer, answer.status_code)
        assert answer.status_code in (400, 413), answer.text[:200]
        assert error["param"] in ("max_request_bytes", "header", "prompt"), error

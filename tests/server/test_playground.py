# SPDX-License-Identifier: Apache-2.0
"""The page at /choreo/ in a real browser, on a real server: what is dragged is what is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser import AXE, Page, needs_chromium, open_browser
from tests.server.serving import QUICK, Session
from tests.transcript.transcripts import HOSTILE
from vllm_choreo.server.playground.routes import FILES
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = pytest.mark.exhaustive  # servers and browsers of their own

TEXTS = {
    "shed": "The shed is green.\n",
    "anna": "Anna owns a red bicycle.\n",
    "bob": "Bob sings.\n",
}
HEADER = "What is green? It is the"
SHOWN = '[data-mode="{}"] .answer'


@pytest.fixture(scope="module")
def page_server(
    shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with two API keys that serves the page."""
    folder = tmp_path_factory.mktemp("playground")
    with start_server(shallow_model_path, folder, choreo_page=True, **QUICK) as running:
        yield running


@pytest.fixture
def page(page_server: Server, tmp_path: Path) -> Iterator[Page]:
    """The page, with the key of the first tenant."""
    with open_browser(tmp_path) as opened:
        opened.open(f"{page_server.base_url}/choreo/")
        opened.wait("!document.getElementById('key-form').hidden")
        use_key(opened, KEYS[0])
        opened.logged.clear()  # that there was no key at first
        yield opened
        foreign = {urlsplit(url).netloc for url in opened.requested if not url.startswith("data:")}
        assert foreign == {urlsplit(page_server.base_url).netloc}


def use_key(page: Page, key: str) -> None:
    page.type("#key", key)
    page.click("#key-form button")
    page.wait("document.getElementById('status').innerText === 'Ready.'")


def encode(page: Page, name: str, text: str) -> None:
    page.type("#message-name", name)
    page.type("#message-text", text)
    page.click("#message-form button")
    page.wait(f"document.getElementById('status').innerText === '{name} is encoded.'")


def parents(page: Page) -> list[str]:
    listed: list[str] = page.evaluate(
        "[...document.querySelectorAll('#parents > li')].map((item) => item.dataset.parent)"
    )
    return listed


def run(page: Page, name: str, num_tokens: int = 8) -> None:
    page.type("#call-name", name)
    page.type("#header", HEADER)
    page.type("#max-tokens", str(num_tokens))
    page.click("#run")
    page.wait(f"document.getElementById('status').innerText.startsWith('{name} is answered')")


def shown_tokens(page: Page, mode: str) -> list[int]:
    pieces = f"document.querySelectorAll('{SHOWN.format(mode)} span')"
    ids: str = page.evaluate(f"[...{pieces}].map((piece) => piece.dataset.tokenIds).join(' ')")
    return [int(token_id) for token_id in ids.split()]


def by_api(client: httpx.Client, mode: str, named: list[str], num_tokens: int) -> Any:
    """The message of the same call over the API, in a session of its own."""
    session = Session(client, mode=mode)
    for name, text in TEXTS.items():
        session.call(type="prefill", content=text, save_as=name)
    message = session.call(
        content=HEADER,
        parents=named,
        sampling_params={"temperature": 0, "max_tokens": num_tokens},
    )
    client.delete(session.path)
    return message


@needs_chromium
def test_what_is_dragged_is_called_both_ways(page: Page, page_server: Server) -> None:
    for name, text in TEXTS.items():
        encode(page, name, text)
    page.drag('#messages [data-message="shed"]', "#parents")
    page.drag('#messages [data-message="anna"]', '#parents [data-parent="shed"]', 0.1)
    page.drag('#messages [data-message="bob"]', '#parents [data-parent="shed"]', 0.9)
    assert parents(page) == ["anna", "shed", "bob"]
    page.drag('#parents [data-parent="bob"]', '#parents [data-parent="anna"]', 0.1)
    assert parents(page) == ["bob", "anna", "shed"]
    run(page, "answer")
    with page_server.client(KEYS[0]) as client:
        for mode in ("choreo", "baseline"):
            expected = by_api(client, mode, ["bob", "anna", "shed"], 8)
            assert shown_tokens(page, mode) == expected["generated_token_ids"]
            shown = page.evaluate(f"document.querySelector('{SHOWN.format(mode)}').textContent")
            assert shown == expected["generated_text"]
    numbers = page.text('[data-mode="choreo"] dl')
    num_parent_tokens = sum(
        page.evaluate(
            "[...document.querySelectorAll('#messages > li')].slice(0, 3)"
            ".map((item) => Number(item.innerText.match(/\\((\\d+) tokens\\)/)[1]))"
        )
    )
    lines = numbers.splitlines()
    assert lines[lines.index("Tokens read from the cache") + 1] == str(num_parent_tokens)
    assert lines[lines.index("First token, in the server") + 1].endswith(" ms")
    # Who read whom, as a drawing and in words, and where it lies.
    edges = page.evaluate(
        "[...document.querySelectorAll('#graph path')].map((e) => [e.dataset.from, e.dataset.to])"
    )
    assert edges == [["bob", "answer"], ["anna", "answer"], ["shed", "answer"]]
    assert "answer read bob, anna, shed" in page.text("#readings")
    rows = page.text("#blocks")
    assert all(name in rows for name in (*TEXTS, "answer")) and "×" in rows
    assert not page.logged


@needs_chromium
def test_it_is_done_by_keys_as_well(page: Page) -> None:
    for name, text in TEXTS.items():
        encode(page, name, text)
    for name in TEXTS:
        page.evaluate(f"document.querySelector('[aria-label=\"Add to the call: {name}\"]').focus()")
        page.press("Enter")
    assert parents(page) == ["shed", "anna", "bob"]
    page.evaluate("document.querySelector('#parents [data-parent=\"bob\"]').focus()")
    page.press("ArrowUp")
    assert parents(page) == ["shed", "bob", "anna"]
    assert page.evaluate("document.activeElement.dataset.parent") == "bob"
    assert page.text("#status") == "bob is number 2 of the call."
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert parents(page) == ["shed", "anna", "bob"]
    page.press("Delete")
    assert parents(page) == ["shed", "anna"]
    assert page.text("#status") == "bob is no longer in the call."


@needs_chromium
def test_hostile_text_is_text(page: Page) -> None:
    hostile = HOSTILE + "<img src=x onerror=\"document.title='broken'\"><script>alert(1)</script>"
    page.type("#message-name", "<b>bold")
    page.type("#message-text", hostile)
    page.click("#message-form button")
    page.wait("document.getElementById('error').innerText.includes('save_as')")
    page.type("#message-name", "bold")
    page.click("#message-form button")
    # It is listed before that: until then no call can be sent.
    page.wait("document.getElementById('status').innerText === 'bold is encoded.'")
    assert page.evaluate("document.querySelectorAll('#messages > li').length") == 1
    page.click("#messages button")
    page.type("#header", hostile)
    page.type("#max-tokens", "8")
    page.click("#run")
    page.wait("document.getElementById('status').innerText.startsWith('a1 is answered')")
    second = "document.querySelectorAll('#messages .body')[1].textContent"
    assert page.evaluate(second).startswith(hostile)
    assert page.evaluate("document.querySelector('#messages .body').textContent") == hostile
    assert "a1 read bold" in page.text("#readings")
    assert page.evaluate("document.querySelectorAll('main img, main script, #error *').length") == 0
    assert page.evaluate("document.title") == "vllm-choreo: try it"
    # And were it made markup by a mistake, the browser would refuse.
    refused = "try { document.body.innerHTML = '<p>'; 'made' } catch (e) { e.name }"
    assert page.evaluate(refused) == "TypeError"


@needs_chromium
def test_errors_are_told_and_nothing_is_half_made(page: Page) -> None:
    encode(page, "shed", TEXTS["shed"])
    page.type("#message-name", "shed")
    page.type("#message-text", "Another shed.")
    page.click("#message-form button")
    page.wait("document.getElementById('error').innerText.includes('shed')")
    assert page.evaluate("document.querySelectorAll('#messages > li').length") == 1
    page.click("#messages button")
    page.type("#header", "word " * 3000)
    page.click("#run")
    page.wait("document.getElementById('error').innerText.includes('max_model_len')")
    run(page, "later")


@needs_chromium
def test_who_stops_a_call_has_nothing_of_it(page: Page) -> None:
    encode(page, "shed", TEXTS["shed"])
    page.click("#messages button")
    page.type("#call-name", "long")
    page.type("#header", HEADER)
    page.type("#max-tokens", "1900")
    page.click("#run")
    page.wait(f"document.querySelectorAll('{SHOWN.format('choreo')} span').length > 1")
    page.click("#stop")
    page.wait("document.getElementById('status').innerText === 'Stopped.'")
    assert page.evaluate("document.querySelectorAll('#messages > li').length") == 1
    assert "long" not in page.text("#blocks")
    run(page, "short")
    assert "short read shed" in page.text("#readings")


@needs_chromium
def test_a_reload_keeps_the_session_and_the_key_stays_in_the_tab(
    page: Page, page_server: Server
) -> None:
    encode(page, "shed", TEXTS["shed"])
    page.open(f"{page_server.base_url}/choreo/")
    page.wait("document.getElementById('status').innerText === 'Ready.'")
    assert "The shed is green." in page.text("#messages")
    assert page.evaluate("sessionStorage.getItem('choreo-key')") == KEYS[0]
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.click("#restart")
    page.wait("document.querySelectorAll('#messages > li').length === 0")


@needs_chromium
@pytest.mark.skipif(not AXE.exists(), reason="no axe-core found (make setup installs it)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Page, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", features=features)
    encode(page, "shed", TEXTS["shed"])
    page.click("#messages button")
    run(page, "answer")
    assert page.serious_findings() == []
    page.evaluate("document.getElementById('key-form').hidden = false")
    assert page.serious_findings() == []


@needs_chromium
def test_without_keys_none_is_asked_for(shallow_model_path: Path, tmp_path: Path) -> None:
    with (
        start_server(
            shallow_model_path, tmp_path, keys=(), settings={"server": {"page": True}}, **QUICK
        ) as server,
        open_browser(tmp_path) as page,
    ):
        page.open(f"{server.base_url}/choreo")
        page.wait("document.getElementById('status').innerText === 'Ready.'")
        assert page.evaluate("document.getElementById('key-form').hidden")
        encode(page, "shed", TEXTS["shed"])


def test_the_files_are_open_and_hold_nothing(page_server: Server) -> None:
    with page_server.client(None) as client:
        for name, kind in FILES.items():
            answer = client.get(f"/choreo/{name}")
            assert answer.status_code == 200
            assert answer.headers["Content-Type"].startswith(kind)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "http" not in policy
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in answer.text and "innerHTML" not in answer.text
        assert client.get("/choreo/routes.py").status_code == 404
        assert client.get("/choreo/..%2Froutes.py").status_code == 404
        assert client.get("/v1/choreo/sessions/x/blocks").status_code == 401


def test_the_page_is_served_as_the_documentation_says(page_server: Server) -> None:
    text = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^vllm serve .*--choreo-page.*$", text, re.MULTILINE)
    program, serve, model, *words = shlex.split(command)
    assert (program, serve, model) == ("vllm", "serve", "MODEL")
    given = page_server.process.args
    assert isinstance(given, list)
    assert {word for word in words if word.startswith("--")} <= set(map(str, given))


def test_blocks_are_those_of_the_engine(page_server: Server) -> None:
    with page_server.client(KEYS[0]) as client:
        session = Session(client)
        session.call(type="prefill", content=list(range(5, 45)), save_as="known")
        session.call(
            content=[6], parents=["known"], save_as="answer", sampling_params={"max_tokens": 3}
        )
        answer = client.get(f"{session.path}/blocks").json()
        known, made = answer["data"]
        assert known["id"] == f"{session.id}/known" and known["num_tokens"] == 40
        size = answer["block_size"]
        assert [b["num_valid_slots"] for b in known["blocks"]] == [size, 40 - size]
        assert made["num_tokens"] == 4 and len(made["blocks"]) == 1
        (of_known,), (of_made,) = known["bytes_by_group"], made["bytes_by_group"]
        assert of_known == 2 * of_made > 0 == known["state_bytes"] == known["host_bytes"]
        client.post(f"{session.path}/messages/known/evict")
        evicted = client.get(f"{session.path}/blocks").json()["data"][0]
        assert evicted["blocks"] == evicted["bytes_by_group"] == []
        text = Session(client, mode="baseline")
        text.call(type="prefill", content="x")
        assert client.get(f"{text.path}/blocks").json()["data"] == []
        for opened in (session, text):
            client.delete(opened.path)


def test_it_is_off_unless_asked_for(server: Server) -> None:
    with server.client(KEYS[0]) as client:
        session = Session(client)
        for path in ("/choreo/", "/choreo/page.js", f"{session.path}/blocks"):
            answer = client.get(path)
            assert answer.status_code == 404, path
            assert "--choreo-page" in json.dumps(answer.json())
        client.delete(session.path)

# SPDX-License-Identifier: Apache-2.0
"""The built site in a real browser: every page, as a stranger reads it over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.browser import AXE, Page, needs_chromium, open_browser
from tests.repository.pages import ROOT

SITE = ROOT / "site"
pytestmark = [
    pytest.mark.exhaustive,  # a browser of its own, and some sixty pages
    needs_chromium,
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core found (make setup installs it)"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no site found: make docs"),
]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_and_loads_nothing_from_elsewhere(
    name: str, page: Page, address: str
) -> None:
    page.requested.clear()
    page.logged.clear()
    page.open(f"{address}/{name}")
    assert page.serious_findings() == []
    elsewhere = [url for url in page.requested if not url.startswith((address, "data:", "blob:"))]
    assert page.requested and not elsewhere
    assert not page.logged


def test_words_are_found(page: Page, address: str) -> None:
    page.open(f"{address}/index.html")
    page.click("label.md-search__icon[for=__search], label.md-header__button[for=__search]")
    page.type("input.md-search__input", "tenant_share")
    page.evaluate(
        "document.querySelector('input.md-search__input')"
        ".dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    )
    page.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    assert "Operating a server" in page.text(".md-search-result__list")


def test_the_dark_scheme_is_accessible(page: Page, address: str) -> None:
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    for name in ("index.html", "operating.html", "reference/programs.html", "RESULTS.html"):
        page.open(f"{address}/{name}")
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert page.serious_findings() == [], name

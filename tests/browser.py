# SPDX-License-Identifier: Apache-2.0
"""Chromium, driven over its debugging protocol: what a user does with mouse and keys."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium found (CONTRIBUTING.md says how to get one)"
)
# Where `make setup` puts axe-core: its package cannot be imported without Playwright.
AXE = Path(sysconfig.get_path("purelib")) / "axe_playwright_python/axe.min.js"
_SECONDS = 240.0


class Page:
    """A page in a browser.

    Attributes:
        logged: texts of the console, and of exceptions that no script has caught.
        requested: URLs of all requests that the page has made.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.logged: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def wait_for(self, event: str) -> dict[str, Any]:
        """Parameters of the next event of this name, or of one that came since the last call."""
        while True:
            for found in self._events:
                if found["method"] == event:
                    self._events.remove(found)
                    parameters: dict[str, Any] = found["params"]
                    return parameters
            self._receive()

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._connection.recv(timeout=_SECONDS))
        match answer.get("method"):
            case "Runtime.consoleAPICalled":
                values = answer["params"]["args"]
                self.logged.append(" ".join(str(v.get("value", v)) for v in values))
            case "Runtime.exceptionThrown":
                self.logged.append(json.dumps(answer["params"]["exceptionDetails"])[:2000])
            case "Log.entryAdded":
                self.logged.append(answer["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            case "Page.loadEventFired" | "Input.dragIntercepted":
                self._events.append(answer)
        return answer

    # -- what is shown ---------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Value of an expression of JavaScript, awaited."""
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true, looked at whenever the page draws itself."""
        look = (
            f"const look = () => ({condition}) ? done(true) : "
            f"performance.now() < end ? setTimeout(look, 20) : done(false)"
        )
        waited = (
            f"new Promise((done) => {{ const end = performance.now() + {_SECONDS * 900}; "
            f"{look}; look(); }})"
        )
        assert self.evaluate(waited), (condition, self.text("body")[:3000], self.logged)

    def text(self, selector: str) -> str:
        """Text of an element as it is shown."""
        shown: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return shown

    # -- what a user does ------------------------------------------------------------------------

    def click(self, selector: str) -> None:
        """Click into the middle of an element, which is scrolled to."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y)

    def type(self, selector: str, text: str) -> None:
        """Type text into a field in place of what is in it."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); "
            "field.focus(); field.select(); })()"
        )
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key that has a name, where the focus is."""
        code = {"ArrowUp": 38, "ArrowDown": 40, "Delete": 46, "Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text="\r" if key == "Enter" and kind == "keyDown" else "",
            )

    def drag(self, selector: str, onto: str, place: float = 0.5) -> None:
        """Drag an element by the mouse and let it go over another one.

        Args:
            place: how far down in the other one; 0: its upper edge, 1: its lower one.
        """
        self.call("Input.setInterceptDrags", enabled=True)
        x, y = self._middle(selector, 0.15)
        self._mouse("mousePressed", x, y)
        self._mouse("mouseMoved", x + 12, y + 12)
        data = self.wait_for("Input.dragIntercepted")["data"]
        x, y = self._middle(onto, place)
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)
        self._mouse("mouseReleased", x, y)
        self.call("Input.setInterceptDrags", enabled=False)

    def _mouse(self, kind: str, x: float, y: float) -> None:
        buttons = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **buttons)

    def _middle(self, selector: str, place: float = 0.5) -> tuple[float, float]:
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "if (!e) return null; e.scrollIntoView({block: 'center'}); "
            "const b = e.getBoundingClientRect(); "
            f"return [b.left + b.width / 2, b.top + b.height * {place}]; }})()"
        )
        assert found, f"there is no {selector}"
        return found[0], found[1]

    def serious_findings(self) -> list[str]:
        """Findings of axe-core on the page that are serious or critical."""
        self.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
        found = self.evaluate("axe.run().then((r) => r.violations)")
        return [
            f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:200]}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Run Chromium without a window, with a profile of its own in `folder`.

    Yields:
        Its one page, still empty.
    """
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1280,1600", "--disable-extensions", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = "DevTools listening on ws://"
        line = next(line for line in process.stderr if told in line)
        address = line.partition("ws://")[2].partition("/")[0]
        targets = httpx.get(f"http://{address}/json/list", timeout=60).json()
        url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
        with connect(url, max_size=None, open_timeout=60) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait()

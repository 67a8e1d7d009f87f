# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.site.accessibility`: axe-core in Chromium on every page of the built site.

A finding that axe calls serious or critical fails. axe-core comes in a package of its own, which
`make accessible` installs beside the others; it is not a part of this repository.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.site.hooks import ROOT

SITE = ROOT / "site"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SERIOUS = {"serious", "critical"}
# Run when the page is complete; what it finds becomes the page's text.
_RUN = """
window.addEventListener("load", () => axe.run().then(({violations, passes}) => {
  const found = document.createElement("pre");
  found.id = "axe-found";
  found.textContent = JSON.stringify({passes: passes.length, violations: violations.map(v => ({
    id: v.id, impact: v.impact, help: v.help, where: v.nodes.slice(0, 3).map(n => n.html)}))});
  document.body.append(found);
}));
"""


def axe_source() -> str:
    """Read axe-core, as one script; empty where its package is not installed."""
    spec = find_spec("axe_playwright_python")
    if spec is None or not spec.submodule_search_locations:
        return ""
    return (Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP, as a site is read; the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def findings(chromium: str, address: str) -> dict[str, Any]:
    """Run axe on a page that has it; what it found.

    Raises:
        RuntimeError: axe did not come to an end.
    """
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1360,2000"]
    command += ["--virtual-time-budget=20000", "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="axe-found">(.*?)</pre>', shown.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError(f"axe did not end on {address}: {shown.stderr[-500:]}")
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


def main() -> int:
    """Look at all pages, or at those that are named; 1 if a finding is serious."""
    axe, chromium = axe_source(), next(filter(None, map(shutil.which, _NAMES)), "")
    if not axe or not chromium or not (SITE / "index.html").exists():
        print("needs axe-core, Chromium and a built site: make accessible", file=sys.stderr)
        return 1
    serious = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "site"
        shutil.copytree(SITE, copy)
        (copy / "axe.js").write_text(axe + _RUN, encoding="utf-8")
        pages = [path.relative_to(copy) for path in sorted(copy.rglob("*.html"))]
        pages = [page for page in pages if not sys.argv[1:] or str(page) in sys.argv[1:]]
        with served(copy) as address:
            for page in pages:
                text = (copy / page).read_text(encoding="utf-8")
                script = '<script src="/axe.js"></script></body>'
                (copy / page).write_text(text.replace("</body>", script), encoding="utf-8")
                found = findings(chromium, f"{address}/{page.as_posix()}")
                bad = [v for v in found["violations"] if v["impact"] in _SERIOUS]
                print(f"{page}: {found['passes']} rules pass, {len(found['violations'])} do not")
                for violation in bad:
                    print(f"  {violation['impact']}: {violation['id']}: {violation['help']}")
                    print(*(f"    {where[:200]}" for where in violation["where"]), sep="\n")
                serious += len(bad)
    print(f"{len(pages)} pages, {serious} serious findings")
    return int(serious > 0 or not pages)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Routes of the page: files that hold nothing of anybody, and load nothing from another host.

They lie outside /v1, where vLLM asks for an API key, so that a browser can load them; all that the
page shows it asks of the routes under /v1/choreo, with the key that its user has typed.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, RedirectResponse, Response

from vllm_choreo.server.errors import error_response
from vllm_choreo.server.routes import page_off_error, sessions_of

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
FILES = {path.name: _TYPES[path.suffix] for path in _FOLDER.iterdir() if path.suffix in _TYPES}
_START = "index.html"
# What the browser is told to refuse, should anything slip through: other hosts, scripts and styles
# in the text of the page, frames around it, and text that is made markup.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(prefix="/choreo", include_in_schema=False)


@router.get("")
async def go_to_page() -> Response:
    """Redirect to the page: its files are named relative to it, whatever proxy stands before."""
    return RedirectResponse("choreo/")


@router.get("/")
async def show_page(request: Request) -> Response:
    """Answer the page, or 404 if it is off."""
    return _file(request, _START)


@router.get("/{name}")
async def read_file(request: Request, name: str) -> Response:
    """Answer a file of the page, or 404."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if not sessions_of(request).config.page:
        return error_response(page_off_error(), 404)
    if name not in FILES:
        return Response(status_code=404)
    return FileResponse(_FOLDER / name, media_type=FILES[name], headers=_HEADERS)

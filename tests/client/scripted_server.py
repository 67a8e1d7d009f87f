# SPDX-License-Identifier: Apache-2.0
"""A server of a few lines: it answers what a test says, on a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
        **changes,
    }


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

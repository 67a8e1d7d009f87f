# SPDX-License-Identifier: Apache-2.0
"""`InProcessServer`: vLLM's server as an object of a program, for agents that bring their engine.

    with InProcessServer("MODEL", max_model_len=4096) as server:
        llm = ChatChoreo(server=server)

All that the server does is there (streams, tools, structured output, `choreo_auto`), through a
socket in a folder of this user's instead of a port. Needs vLLM, unlike its neighbours.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.integrations.openai_http import (
    ChoreoAsyncHttpClient,
    ChoreoHttpClient,
    transports,
)

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

# Requests go where the socket lies; HTTP wants a host all the same.
_BASE_URL = "http://in-process/v1"
_OF_ITS_OWN = ("host", "port", "uds", "api_key", "plugin", "api_server_count", "headless")


class InProcessServer:
    """vLLM's server with the plugin, on a thread of this process; `close` ends it.

    As with every engine of vLLM's, a script that makes one is guarded by
    `if __name__ == "__main__":`, for the engine's own process imports it.

    Args:
        model: folder or name.
        options: options of `vllm serve`, with underscores: `max_model_len=4096`,
            `choreo_auto="exact"`; see `words_of`.

    Attributes:
        model: name by which requests call the model.
        base_url, api_key: OpenAI's clients insist on both; the socket alone decides who is reached.

    Raises:
        UnsupportedOptionError: an option that is the object's own, such as a port.
        SystemExit: an option that `vllm serve` does not have, as on its command line.
        Exception: what ended the engine's start.
    """

    base_url = _BASE_URL
    api_key = "none"

    def __init__(self, model: str | Path, **options: object) -> None:
        for name in _OF_ITS_OWN:
            if name in options:
                raise UnsupportedOptionError(
                    "a server in a program has no address and no keys: leave it out, or start "
                    "`vllm serve`",
                    parameter=name,
                    value=options[name],
                )
        self._folder = tempfile.TemporaryDirectory(prefix="choreo-")
        self._socket = str(Path(self._folder.name) / "server")
        self._started: Future[None] = Future()
        args = parse_options(str(model), options)
        self.model: str = (args.served_model_name or [args.model])[0]
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, args=(args,), daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> InProcessServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and its engine; may be called twice."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()
        self._folder.cleanup()

    def http_client(self, conversations: Conversations | None = None) -> ChoreoHttpClient:
        """A client for OpenAI's SDK: `OpenAI(http_client=…, base_url=…, api_key=…)`."""
        transport, _ = transports(self._socket)
        return ChoreoHttpClient(conversations, transport=transport)

    def http_async_client(
        self, conversations: Conversations | None = None
    ) -> ChoreoAsyncHttpClient:
        """A client for `AsyncOpenAI`; see `http_client`."""
        _, transport = transports(self._socket)
        return ChoreoAsyncHttpClient(conversations, transport=transport)

    def _run(self, args: Namespace) -> None:
        # Until the server listens, an error is that of the constructor, which waits for it.
        try:
            asyncio.run(self._serve(args))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, args: Namespace) -> None:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        async with build_async_engine_client(args) as engine:
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, app.state, args, tasks)
            self._server = _server(app, self._socket, lambda: self._started.set_result(None))
            await self._server.serve()
        if not self._started.done():
            raise RuntimeError("the server ended at its start: the log above says why")


def words_of(options: Mapping[str, object]) -> list[str]:
    """Options as the words of a command of vLLM's: `max_model_len=512` for `--max-model-len 512`.

    True stands for a flag, False for its opposite (`--no-…`), a list for several values, a dict for
    JSON; what is None is left out.
    """
    words = []
    for name, value in options.items():
        if value is None:
            continue
        words.append(f"--{'no-' if value is False else ''}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words += [_written(one) for one in (value if isinstance(value, list) else [value])]
    return words


def parse_options(model: str, options: Mapping[str, object]) -> Namespace:
    """Parse options as the command line of `vllm serve MODEL --plugin choreo` does.

    Raises:
        SystemExit: an option that `vllm serve` does not have.
    """
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # As vLLM's command line does.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    words = ["--model", model, "--plugin", "choreo", *words_of(options)]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _server(app: FastAPI, path: str, started: Callable[[], None]) -> uvicorn.Server:
    """A server of `app` at a socket, which tells when it listens."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not self.should_exit:  # which a failed start sets
                started()

    return Server(uvicorn.Config(app, uds=path, log_level="warning"))

# SPDX-License-Identifier: Apache-2.0
"""Servers for tests and benchmarks: `vllm serve` processes with the plugin."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_choreo.integrations.in_process import words_of

KEYS = ("alpha", "beta")
MODEL_NAME = "smollm"
_START_SECONDS = 600.0  # of a machine that has other things to do, too
_STOP_SECONDS = 20.0
# Set for engines in this process; a server has an engine process and writes a log.
_NOT_FOR_SERVERS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        base_url: without a path, for example http://127.0.0.1:8000.
        keys: its API keys; each is a tenant.
        model: the name under which it serves its model.
        log: file with its stdout and stderr.
        process: the API server, leader of its process group.
    """

    base_url: str
    keys: tuple[str, ...]
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def client(self, key: str | None = KEYS[0], **options: Any) -> httpx.Client:
        """Return an HTTP client that sends `key`; None: no key."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        options = {"timeout": 120.0, **options}
        return httpx.Client(base_url=self.base_url, headers=headers, **options)

    def log_tail(self, num_lines: int = 60) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


@contextmanager
def start_server(
    model_path: Path,
    folder: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    keys: Sequence[str] = KEYS,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> Iterator[Server]:
    """Run `vllm serve` with the plugin, and end it with everything that it started.

    Args:
        model_path: the model.
        folder: for the log.
        settings: the plugin's, the value of `additional_config["choreo"]`.
        keys: API keys; none: no key is asked for.
        env: changes to the environment.
        options: the command's, see `words_of`; None leaves out one that is set by default.

    Yields:
        The server, when it answers.

    Raises:
        RuntimeError: it ended at its start, or did not answer in time; has the end of its log.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model_path)]
    command += words_of(_defaults(settings, keys) | {"port": port} | options)
    log = folder / f"server-{port}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", tuple(keys), MODEL_NAME, log, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(process)


def _defaults(settings: Mapping[str, Any] | None, keys: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "plugin": "choreo",
        "host": "127.0.0.1",
        "served_model_name": MODEL_NAME,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "seed": 0,
        "enable_prompt_tokens_details": True,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    if settings is not None:
        options["additional_config"] = json.dumps({"choreo": settings})
    if keys:
        options["api_key"] = list(keys)
    return options


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment as a server, or another process with an engine, needs it.

    Args:
        changes: variables on top of it, or instead of some.
    """
    variables = {key: os.environ[key] for key in os.environ if key not in _NOT_FOR_SERVERS}
    variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Two threads of a step wait for one another, on a busy machine for seconds, and a client that
    # is to act while a call runs gets its turn too late.
    variables["OMP_NUM_THREADS"] = "1"
    variables["NUMBA_NUM_THREADS"] = "1"  # which n-grams would give torch, too
    return {**variables, **(changes or {})}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended at its start:\n{server.log_tail()}")
        try:
            if httpx.get(f"{server.base_url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"no answer in {_START_SECONDS:.0f} s:\n{server.log_tail()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group; the engine is a child of the API server."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    process.wait()

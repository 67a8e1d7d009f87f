# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo fleet` as a process, and the file for `serve run`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

pytest.importorskip("ray")

from tests.quick import ONE_PROCESS
from vllm_choreo.cluster.app import FleetArgs, build
from vllm_choreo.testing.server import environment, free_port

_COMMAND = """
import argparse, sys
from vllm_choreo.cluster.command import command
parser = argparse.ArgumentParser()
main = command(parser)
sys.exit(main(parser.parse_args()))
"""


def test_the_file_for_serve_run_is_a_fleet() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = Path("examples/fleet.yaml").read_text(encoding="utf-8")
    (app,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert app.import_path == f"{build.__module__}:{build.__name__}"
    args = FleetArgs.model_validate(app.args)
    assert args.max_engines is not None
    assert args.engines < args.max_engines


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_command_serves_and_ends(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    port = free_port()
    words = [str(tiny_model_path("llama")), "--engines", "2", "--port", str(port), "--vllm"]
    words += ["dtype=float32", "enforce_eager", "max_model_len=1024", "served_model_name=tiny"]
    words += ["num_gpu_blocks_override=256", f"distributed_executor_backend={ONE_PROCESS}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *words],
        env=environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("2 engines serve" in line for line in process.stdout)
        # What else it prints is read, too: a full pipe would stop it.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        body = {"model": "tiny", "prompt": "t5 t6", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
        assert answer.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx.HTTPError:
            break
        assert time.monotonic() < deadline, "it still answers"
        time.sleep(0.5)

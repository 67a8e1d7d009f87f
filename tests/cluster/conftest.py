# SPDX-License-Identifier: Apache-2.0
"""A fleet of two engines behind Ray Serve on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.quick import ONE_PROCESS
from vllm_choreo import ChoreoClient
from vllm_choreo.testing.server import KEYS, environment, free_port

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 256,
    "distributed_executor_backend": ONE_PROCESS,
    "served_model_name": "tiny",
    "seed": 0,
    "api_key": list(KEYS),
}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@dataclass(frozen=True)
class Fleet:
    """A fleet that answers."""

    base_url: str

    def client(self, key: str = KEYS[0]) -> ChoreoClient:
        return ChoreoClient(self.base_url, api_key=key, timeout=600)

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Processes of a deployment's replicas."""
        below = psutil.Process().children(recursive=True)
        return [p for p in below if f"ServeReplica:choreo:{deployment}" in _name(p)]

    def kill(self, deployment: str, count: int = 1) -> None:
        """Kill so many replicas of a deployment, the oldest first."""
        found = sorted(self.replicas(deployment), key=lambda process: process.create_time())
        assert len(found) >= count
        for process in found[:count]:
            os.kill(process.pid, signal.SIGKILL)

    def wait_for(self, deployment: str, count: int) -> None:
        """Wait until Serve has so many running replicas."""
        from ray import serve
        from ray.serve.schema import ReplicaState

        deadline = time.monotonic() + 600
        while True:
            states = serve.status().applications["choreo"].deployments[deployment].replica_states
            if states.get(ReplicaState.RUNNING, 0) == count and sum(states.values()) == count:
                return
            assert time.monotonic() < deadline, states
            time.sleep(0.5)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def serving(
    model: Path, *, address: str | None = None, **options: Any
) -> Iterator[Callable[..., Fleet]]:
    """Start Ray, or join it, and Serve; yields a function that starts a fleet.

    Args:
        model: model of the fleet.
        address: address of a cluster; None: Ray is started with `options`.
    """
    import ray
    from ray import serve

    from vllm_choreo.cluster.app import FleetArgs, build

    ray.init(address=address, log_to_driver=False, **options)
    try:
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

        def start(**fields: Any) -> Fleet:
            fields = {"model": str(model), "options": OPTIONS} | fields
            serve.run(build(FleetArgs(**fields)), name="choreo")
            return Fleet(f"http://127.0.0.1:{port}")

        yield start
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Give processes of Ray's the environment of servers, with an engine's core in each."""
    pytest.importorskip("ray.serve")
    wanted = environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})  # one process less for each
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(wanted):
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def start_fleet(
    tiny_model_path: Callable[[str], Path], processes: None
) -> Iterator[Callable[..., Fleet]]:
    """Return a function that starts a fleet on this machine, from fields of `FleetArgs`."""
    with serving(tiny_model_path("llama"), num_cpus=8, include_dashboard=False) as start:
        yield start

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

import httpx
import psutil
import pytest

from tests.quick import ONE_PROCESS
from vllm_choreo import AsyncChoreoClient, ChoreoClient
from vllm_choreo.semantics.message import Message
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
_APP = "choreo"
_STORE_BYTES = 200_000_000
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 100}


@dataclass(frozen=True)
class Fleet:
    """A fleet that answers."""

    base_url: str

    def client(self, key: str = KEYS[0]) -> ChoreoClient:
        return ChoreoClient(self.base_url, api_key=key, timeout=600)

    def async_client(self, key: str = KEYS[0]) -> AsyncChoreoClient:
        return AsyncChoreoClient(self.base_url, api_key=key, timeout=600)

    def engines(self, key: str = KEYS[0]) -> list[dict[str, Any]]:
        """Engines, as the ingress of a key tells of them."""
        url = f"{self.base_url}/v1/choreo/fleet"
        answer = httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=300)
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Processes of a deployment's replicas."""
        below = psutil.Process().children(recursive=True)
        return [p for p in below if f"ServeReplica:{_APP}:{deployment}" in _name(p)]

    def kill(self, deployment: str, count: int = 1) -> None:
        """Kill so many replicas of a deployment, the oldest first."""
        found = sorted(self.replicas(deployment), key=lambda process: process.create_time())
        assert len(found) >= count
        for process in found[:count]:
            os.kill(process.pid, signal.SIGKILL)

    def kill_ingress_of(self, key: str) -> None:
        """Kill the ingress that has the sessions of an API key."""
        import ray

        from vllm_choreo.cluster.journal import places_of
        from vllm_choreo.cluster.router import key_digest

        place = places_of(_APP).place.remote(key_digest(key), self.ingresses())
        name = f"SERVE_REPLICA::{_APP}#ingress#{ray.get(place)}"
        actor = ray.get_actor(name, namespace="serve")
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

    def ingresses(self) -> list[str]:
        """Ids of the ingresses' replicas."""
        import ray

        named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return sorted(n.rpartition("#")[2] for n in named if f"{_APP}#ingress#" in n)

    def wait_for(self, deployment: str, count: int) -> None:
        """Wait until Serve has so many running replicas."""
        from ray import serve
        from ray.serve.schema import ReplicaState

        deadline = time.monotonic() + 600
        while True:
            states = serve.status().applications[_APP].deployments[deployment].replica_states
            if states.get(ReplicaState.RUNNING, 0) == count and sum(states.values()) == count:
                return
            assert time.monotonic() < deadline, states
            time.sleep(0.5)


async def streamed(
    c: AsyncChoreoClient, parents: list[Message], on_first: Callable[[], object]
) -> tuple[int, ...]:
    """Stream an answer; `on_first` is called when its first tokens have come."""
    tokens: list[int] = []
    async for piece in c.stream_decode("t5 t6", parents=parents, sampling_params=LONG):
        if not tokens and piece.token_ids:
            on_first()
        tokens += piece.token_ids
    return tuple(tokens)


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
    from vllm_choreo.cluster.ray_processes import start_ray

    if address is None:
        start_ray(1, log_to_driver=False, object_store_memory=_STORE_BYTES, **options)
    else:
        ray.init(address=address, log_to_driver=False, **options)
    try:
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

        def start(**fields: Any) -> Fleet:
            fields = {"model": str(model), "options": OPTIONS, "num_cpus": 0.1} | fields
            serve.run(build(FleetArgs(**fields)), name=_APP)
            return Fleet(f"http://127.0.0.1:{port}")

        yield start
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Give processes of Ray's the environment of servers, with an engine's core in each."""
    pytest.importorskip("ray.serve")
    # An engine is one process, and no nicer than this one.
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RAY_worker_niceness": "0"}
    wanted = environment(changes)
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
    with serving(tiny_model_path("llama")) as start:
        yield start

# SPDX-License-Identifier: Apache-2.0
"""`front_of`: an AsyncLLM in front of engines that are replicas of Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_choreo.cluster.client import ReplicaClient, ServeClient, connect
from vllm_choreo.cluster.identity import identity_of
from vllm_choreo.cluster.members import Members, members_of
from vllm_choreo.engine.fleet_client import client_class
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from argparse import Namespace

    from ray.serve.handle import DeploymentHandle
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.choreo.cluster")

_RETRY_SECONDS = 1.0


@asynccontextmanager
async def front_of(
    engines: DeploymentHandle,
    args: Namespace,
    owner: str,
    make: Callable[..., ServeClient] = ServeClient,
) -> AsyncIterator[AsyncLLM]:
    """Make an AsyncLLM whose engines are the replicas of a deployment, when the first one answers.

    Args:
        engines: handle of the deployment, whose router is a `PlacedRouter`.
        args: command line of `vllm serve`, as it was parsed; its `data_parallel_size` says how many
            engines there may be at a time, 2 at least.
        owner: name of who asks; engines know by it whose messages they have.
        make: function that makes the client.

    Raises:
        UnsupportedOptionError: the first engine is none of this fleet.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    identity = identity_of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    reach = partial(connect, engines, owner=owner, identity=identity)
    members = members_of(engines.app_name, engines.deployment_name)
    first = await _first_engine(engines, members, reach)
    # Here may be no weights; in an engine there are.
    identity.update({k: v for k, v in first.info.identity.items() if not identity.get(k)})
    made = partial(make, first=[first], members=members, connect=reach)
    token = client_class.set(made)
    try:
        building = build_async_engine_client(args)
        llm = await building.__aenter__()
    finally:
        client_class.reset(token)
    try:
        yield llm
    finally:
        await building.__aexit__(None, None, None)


async def _first_engine(
    engines: DeploymentHandle, members: Members, reach: Callable[[str], Awaitable[ReplicaClient]]
) -> ReplicaClient:
    """Wait for the first engine that answers.

    Raises:
        UnsupportedOptionError: it is none of this fleet.
    """
    engines.options(method_name="describe")  # its router begins to hear of replicas
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    ids: list[str] = []

    def hear(told: Sequence[str]) -> None:
        ids[:] = told
        heard.set()

    members.listen(lambda told: loop.call_soon_threadsafe(hear, list(told)))
    while True:
        await heard.wait()
        for replica in list(ids):
            try:
                return await reach(replica)
            except UnsupportedOptionError:
                raise
            except Exception as error:
                logger.warning("replica %s does not answer yet: %r", replica, error)
        heard.clear()
        try:
            await asyncio.wait_for(heard.wait(), _RETRY_SECONDS)
        except TimeoutError:
            heard.set()

# SPDX-License-Identifier: Apache-2.0
"""`Ingress`: vLLM's API server with the plugin's routes, as a deployment in front of the engines.

The app is the one that `vllm serve --plugin choreo` builds, on an AsyncLLM of several engines. Only
the engines' client is another one: `ServeClient`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from ray import serve

from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.cluster.front import front_of
from vllm_choreo.cluster.identity import digest_of
from vllm_choreo.cluster.journal import JournalWriter, journal_of
from vllm_choreo.cluster.takeover import Takeover
from vllm_choreo.cluster.transfer import ObjectStoreTransfer
from vllm_choreo.server.tenants import use_secret

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp
    from vllm.v1.engine.async_llm import AsyncLLM


@serve.ingress()
class Ingress:
    """The server of a fleet.

    Args:
        engines: handle of the engines' deployment.
        model: folder or name.
        options: options of `vllm serve`, with underscores.
        max_engines: so many engines there may be at a time.
    """

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self,
        engines: DeploymentHandle,
        model: str,
        options: Mapping[str, object],
        max_engines: int,
    ) -> None:
        from vllm_choreo.cluster.ray_processes import warn_of_niceness
        from vllm_choreo.integrations.in_process import parse_options

        warn_of_niceness()
        # One place is one engine to vLLM, which would make another client for it.
        args = parse_options(model, {**options, "data_parallel_size": max(2, max_engines)})
        owner: str = serve.get_replica_context().replica_id.unique_id
        self._stack = AsyncExitStack()
        llm = await self._stack.enter_async_context(front_of(engines, args, owner))
        journal = journal_of(engines.app_name, digest_of(llm.engine_core.identity))
        use_secret(await journal.secret.remote(secrets.token_bytes(32)))
        app = await server_app(llm, args)
        self._app = with_takeover(app, llm, JournalWriter(journal, owner))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_stack"):
            await self._stack.aclose()


async def server_app(llm: AsyncLLM, args: Namespace) -> FastAPI:
    """The app that vLLM's API server serves, with the routes of its plugins."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def with_takeover(app: FastAPI, llm: AsyncLLM, writer: JournalWriter) -> ASGIApp:
    """The app of an ingress that goes on for others, and they for it."""
    fleet, sessions = fleet_of(llm), app.state.choreo
    assert fleet is not None, "the client is of several engines"
    fleet.journal = sessions.journal = writer
    fleet.move_by(ObjectStoreTransfer())
    return Takeover(app, sessions, writer)

# SPDX-License-Identifier: Apache-2.0
"""`ChoreoEndpoints`: how vLLM's API server gets our routes, and its batch runner our handlers.

vLLM goes on without a plugin that cannot be imported, and would serve without the routes that were
asked for. So this module imports next to nothing: what it needs is imported when vLLM calls it,
where an error ends the server.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.server.openai.auto_chats import AutoChats
    from vllm_choreo.server.sessions import Sessions


class ChoreoEndpoints:
    """Entry point of `vllm.endpoint_plugins`; vLLM makes one for each API server, or batch.

    After `init_state`, `app.state.choreo` is the `Sessions` of the server, `choreo_fleet` its
    `Fleet` or None, `choreo_reader` its `CallReader`, and `choreo_snapshots` its `SnapshotFolders`
    or None; wings add what is theirs.
    """

    name = "choreo"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._has_routes = False  # a batch has none

    def attach_router(self, app: FastAPI) -> None:
        from vllm_choreo.server import message_routes, routes, snapshot_routes
        from vllm_choreo.server.errors import answer_error
        from vllm_choreo.server.playground import routes as playground_routes
        from vllm_choreo.server.tenants import TenantMiddleware
        from vllm_choreo.server.wings import wings

        self._has_routes = True
        app.add_middleware(TenantMiddleware)
        app.include_router(routes.router)
        app.include_router(message_routes.router)
        app.include_router(snapshot_routes.router)
        app.include_router(playground_routes.router)
        for wing in wings():
            app.include_router(wing.router)
        app.add_exception_handler(ChoreoError, answer_error)

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Set up the sessions of a server or a batch, and the handlers that choreograph.

        Raises:
            UnsupportedOptionError: several API servers, of which a session lives in one; or an
                option that several engines do not have.
            ChoreoError: what the command line asks for, or a wing, cannot be set up.
        """
        from vllm_choreo.api.fleet import fleet_of
        from vllm_choreo.config import ChoreoConfig
        from vllm_choreo.server import exchange, metrics, snapshot_folders
        from vllm_choreo.server.call_reader import CallReader
        from vllm_choreo.server.guard import guarded
        from vllm_choreo.server.openai import batch, handlers
        from vllm_choreo.server.served_adapters import ServedAdapters
        from vllm_choreo.server.sessions import Sessions
        from vllm_choreo.server.tenants import use_keys
        from vllm_choreo.server.wings import wings

        check_one_process(args)
        check_one_engine(args, engine_client.vllm_config.parallel_config.data_parallel_size)
        use_keys(api_keys(args))
        settings = ChoreoConfig.from_vllm(engine_client.vllm_config)
        shows_page = settings.server.page or bool(getattr(args, "choreo_page", False))
        config = replace(settings.server, page=shows_page)
        llm = guarded(engine_client, state.openai_serving_responses)
        state.choreo = Sessions(llm, config, state.openai_serving_models.model_name())
        state.choreo_fleet = fleet_of(engine_client)
        metrics.start(state.choreo, engine_client)
        if self._has_routes:
            adapters = ServedAdapters(state.openai_serving_models)
            state.choreo_reader = CallReader(state.online_renderer, adapters, state.choreo.work)
            for wing in wings():
                if wing.start is not None:
                    await wing.start(state, args)
            state.choreo_snapshots, loaded = await asyncio.to_thread(
                snapshot_folders.start,
                getattr(args, "choreo_keep", None),
                getattr(args, "choreo_load", None),
                config,
                settings.keep_key,
            )
            state.choreo.exchange = await asyncio.to_thread(
                exchange.exchange_of,
                getattr(args, "choreo_pair", None),
                engine_client.vllm_config.model_config.model,
                state.choreo_snapshots,
                config.pair_content,
            )
            if loaded is not None:
                await loaded.load_all(state.choreo)
            state.choreo.start_expiry()
            chats = _auto_chats(state.choreo, llm, engine_client.vllm_config, args)
            handlers.init_state(state, llm, chats)
        else:
            batch.init_batch(state, llm)


def _auto_chats(
    sessions: Sessions, llm: AsyncLLM, vllm_config: VllmConfig, args: Namespace
) -> AutoChats:
    """The chats that name no messages, as the command line and the settings have them."""
    from vllm_choreo.server.auto_messages import TenantChats
    from vllm_choreo.server.openai.auto_chats import AutoChats
    from vllm_choreo.server.openai.auto_options import default_context

    auto = getattr(args, "choreo_auto", None) or "off"
    cut = getattr(args, "choreo_auto_cut", None) or "messages"
    chosen = getattr(args, "choreo_auto_context", None) or sessions.config.auto_context
    context = default_context(chosen, auto, bool(api_keys(args)))
    return AutoChats(TenantChats(sessions, vllm_config), llm, auto, cut, context)


def api_keys(args: Namespace) -> list[str]:
    """API keys that vLLM asks for: those of its command line, or else of its environment."""
    from vllm import envs

    return [key for key in getattr(args, "api_key", None) or [envs.VLLM_API_KEY] if key]


def check_one_process(args: Namespace) -> None:
    """Check that there is one API server.

    Raises:
        UnsupportedOptionError: there are several API servers.
    """
    count = getattr(args, "api_server_count", None)
    if count is not None and count > 1:
        raise UnsupportedOptionError(
            "a session lives in one API server: give --api-server-count 1, or start several "
            "servers, and send each session to one of them",
            parameter="--api-server-count",
            value=count,
        )


def check_one_engine(args: Namespace, num_engines: int) -> None:
    """Check that nothing is asked for that one engine alone can do.

    Raises:
        UnsupportedOptionError: there are several engines, and it is.
    """
    given = getattr(args, "choreo_pair", None)
    if num_engines > 1 and given is not None:
        raise UnsupportedOptionError(
            "what another model has encoded cannot be made again by an engine of several: leave "
            "the option out, or --data-parallel-size",
            parameter="--choreo-pair",
            value=given,
        )

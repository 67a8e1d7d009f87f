# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch --plugin choreo`: our endpoint plugin gets the handlers of the batch runner."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask

_RUNNER = "vllm.entrypoints.launchers.run_batch"


def hook(plugin: str) -> None:
    """Let vLLM's batch runner initialise an endpoint plugin, as its server does.

    The runner makes the state of a server without the app to which plugins attach their routes, and
    vLLM takes a state in which no plugins stand for one without plugins. Safe to call again; does
    nothing in a process that has no batch runner.

    Args:
        plugin: its name; it is initialised if vLLM's settings name it.
    """
    runner: Any = sys.modules.get(_RUNNER)
    if runner is None or hasattr(runner.init_app_state, "plugin"):
        return
    init_app_state = runner.init_app_state

    async def with_plugin(
        engine_client: EngineClient,
        state: State,
        args: argparse.Namespace,
        supported_tasks: tuple[SupportedTask, ...] | None = None,
    ) -> None:
        from vllm.plugins import load_endpoint_plugins

        named = load_endpoint_plugins(supported_tasks)
        state.endpoint_plugins = [endpoints for endpoints in named if endpoints.name == plugin]
        await init_app_state(engine_client, state, args, supported_tasks)

    with_plugin.plugin = plugin  # type: ignore[attr-defined]
    runner.init_app_state = with_plugin

# SPDX-License-Identifier: Apache-2.0
"""`ChoreoEndpoints`: how vLLM's API server gets our routes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError
from vllm_choreo.server import metrics, openai
from vllm_choreo.server.call_reader import CallReader
from vllm_choreo.server.errors import error_response
from vllm_choreo.server.guard import guarded
from vllm_choreo.server.routes import router
from vllm_choreo.server.sessions import Sessions


class ChoreoEndpoints:
    """Entry point of `vllm.endpoint_plugins`; vLLM makes one for each API server.

    After `init_state`, `app.state.choreo` is the `Sessions` of the server and `choreo_reader` its
    `CallReader`.
    """

    name = "choreo"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.add_exception_handler(ChoreoError, _answer_error)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """
        Raises:
            UnsupportedOptionError: several API servers; a session lives in one.
        """
        check_one_process(args)
        config = ChoreoConfig.from_vllm(engine_client.vllm_config).server
        llm = guarded(engine_client, state.openai_serving_responses)
        state.choreo = Sessions(llm, config, state.openai_serving_models.model_name())
        state.choreo_reader = CallReader(state.online_renderer)
        state.choreo.start_expiry()
        metrics.start(state.choreo, engine_client)
        openai.init_state(state, llm)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Of every request that is refused as a whole, at whichever route."""
    assert isinstance(error, ChoreoError)
    request.app.state.choreo.refused(error)
    return error_response(error)


def check_one_process(args: Namespace) -> None:
    """
    Raises:
        UnsupportedOptionError: there are several API servers. (Several engines are refused where
            an engine is configured.)
    """
    count = getattr(args, "api_server_count", None)
    if count is not None and count > 1:
        raise UnsupportedOptionError(
            "a session lives in one API server: start several servers, and send each session to "
            "one of them",
            parameter="--api-server-count",
            value=count,
        )

# SPDX-License-Identifier: Apache-2.0
"""Wing of the server that knows schemas: entry point of `vllm_choreo.routes`."""

from __future__ import annotations

from argparse import Namespace

from starlette.datastructures import State

from vllm_choreo.pml.server.openai import ARGUMENTS, begin
from vllm_choreo.pml.server.routes import router
from vllm_choreo.pml.server.served_schemas import ServedSchemas
from vllm_choreo.server.wings import PromptReader, Wing


def register() -> Wing:
    """Make the wing: routes of schemas and prompts, and prompts on OpenAI's routes."""
    return Wing(router, _start, PromptReader(ARGUMENTS, begin))


async def _start(state: State, args: Namespace) -> None:
    """Set up `state.choreo_schemas`, with the operator's schemas encoded.

    Raises:
        ChoreoError: a file of `--choreo-schema` cannot be read, or holds something else.
    """
    state.choreo_schemas = ServedSchemas(state.choreo, state.online_renderer)
    await state.choreo_schemas.start_operators(getattr(args, "choreo_schema", None) or ())

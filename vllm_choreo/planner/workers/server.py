# SPDX-License-Identifier: Apache-2.0
"""Workers on servers: `vllm serve MODEL --plugin choreo`, one session on each.

async with server_workers(["http://one:8000", "http://two:8000"], api_key="secret") as workers:
    result = await ainvoke(graph, workers)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from vllm_choreo.client.chat_turns import turns_of_server
from vllm_choreo.errors import ChoreoError
from vllm_choreo.planner.logical.values import PromptTurns
from vllm_choreo.planner.workers.facade import FacadeWorker
from vllm_choreo.planner.workers.worker import DEFAULT_WIDTH

_LOGGER = logging.getLogger(__name__)


@asynccontextmanager
async def server_workers(
    urls: Sequence[str],
    *,
    api_key: str | None = None,
    width: int = DEFAULT_WIDTH,
    model: str | None = None,
    **options: Any,
) -> AsyncIterator[list[FacadeWorker]]:
    """Open a worker for each server; their sessions are closed at the end.

    Args:
        urls: addresses of the servers, all with the same model.
        api_key: key that all of them take.
        width: calls of a worker at a time.
        model: name of the model, on which answers depend; without it they cannot be cached.
        options: arguments of `AsyncChoreoClient`.
    """
    from vllm_choreo.client import AsyncChoreoClient

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncChoreoClient(url, api_key=api_key, **options))
            for url in urls
        ]
        turns = await asyncio.to_thread(served_turns, urls[0], api_key) if urls else None
        yield [FacadeWorker(client, width=width, model=model, turns=turns) for client in clients]


def served_turns(url: str, api_key: str | None) -> PromptTurns | None:
    """Texts around the turns of a server's model; None: it tells none, of which the log is told."""
    try:
        return turns_of_server(url, api_key)
    except ChoreoError as error:
        _LOGGER.warning("Prompts are in ChatML unless you give a template=: %s", error)
        return None

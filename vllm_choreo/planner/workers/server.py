# SPDX-License-Identifier: Apache-2.0
"""Workers on servers: `vllm serve MODEL --plugin choreo`, one session on each.

async with server_workers(["http://one:8000", "http://two:8000"], api_key="secret") as workers:
    result = await ainvoke(graph, workers)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from vllm_choreo.planner.workers.facade import FacadeWorker
from vllm_choreo.planner.workers.worker import DEFAULT_WIDTH


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
        yield [FacadeWorker(client, width=width, model=model) for client in clients]

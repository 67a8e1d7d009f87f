# SPDX-License-Identifier: Apache-2.0
"""One of several engines, asked by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm_choreo.api.outcomes import checked_answer
from vllm_choreo.errors import EngineRestartedError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from vllm.v1.engine.async_llm import AsyncLLM


class EngineClient(Protocol):
    """Client of one engine: as much of vLLM's `AsyncMPClient` as operations use."""

    @property
    def resources(self) -> object:
        """State that tells whether the engine has ended."""

    def call_utility_async(self, method: str, *args: object) -> Awaitable[object]: ...

    def collective_rpc_async(
        self, method: str, timeout: float | None = None, args: tuple[object, ...] = ()
    ) -> Awaitable[object]: ...


class OneEngine:
    """One of several engines, as operations take an AsyncLLM: in the life that it has now.

    Args:
        client: client of the engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self.engine_core = client

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        """Run a method of the engine's workers; one answer each."""
        answers = await self.engine_core.collective_rpc_async(method, None, args)
        return cast(list[Any], answers)


async def ask_engine(engine: OneEngine, operation: str, *args: object) -> object:
    """Run an operation of the scheduler in one engine.

    Raises:
        ChoreoError: it is refused.
        EngineRestartedError: the engine has ended.
    """
    from vllm_choreo.engine.utility import call_async

    with _told_of_its_end():
        answer: object = await call_async(cast("AsyncLLM", engine), operation, *args)
        return checked_answer(answer)


async def ask_workers(engine: OneEngine, method: str, *args: object) -> list[Any]:
    """Run a method of the workers of one engine.

    Raises:
        EngineRestartedError: the engine has ended.
    """
    from vllm_choreo.engine.utility import of_workers_async

    with _told_of_its_end():
        return await of_workers_async(cast("AsyncLLM", engine), method, *args)


@contextmanager
def _told_of_its_end() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineRestartedError(
            "the engine has ended, and starts again: do it once more", parameter="engine"
        ) from None

# SPDX-License-Identifier: Apache-2.0
"""Operations of the engine, asked of an `AsyncLLM`: an answer, or that the engine has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.engine import utility


class Client:
    """An engine's client whose engine answers when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.resources = SimpleNamespace(engine_dead=False, output_queue_task=None)

    async def call_utility_async(self, *_: Any) -> str:
        self.resources.output_queue_task = asyncio.ensure_future(asyncio.Event().wait())
        self.asked.set()
        return await self.answered


async def asked(ask: str, happens: str) -> Any:
    """What a caller gets when that happens after it has asked."""
    client = Client()
    llm = SimpleNamespace(
        engine_core=client, collective_rpc=lambda *_, **__: client.call_utility_async()
    )
    waiting = asyncio.ensure_future(getattr(utility, ask)(llm, "stats"))
    await client.asked.wait()
    if happens == "an answer":
        client.answered.set_result("yes")
    elif happens == "its socket ends":
        client.resources.output_queue_task.cancel()
    elif happens == "it is found dead":
        client.resources.engine_dead = True
    else:
        waiting.cancel()
    try:
        return await asyncio.wait_for(waiting, 10)
    finally:
        assert client.answered.done(), "nothing waits any more"


@pytest.mark.parametrize("ask", ["call_async", "of_workers_async"])
def test_an_engine_that_has_ended_is_not_waited_for(ask: str) -> None:
    assert asyncio.run(asked(ask, "an answer")) == "yes"
    for happens in ("its socket ends", "it is found dead"):
        with pytest.raises(EngineDeadError):
            asyncio.run(asked(ask, happens))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asked(ask, "the caller gives up"))

# SPDX-License-Identifier: Apache-2.0
"""From the client to the scheduler: engine-core utilities, in process or across processes."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore

_METHOD = "choreo"


def install() -> None:
    """Give the engine core one more utility. Adds a name; changes none."""
    EngineCore.choreo = _run


def _run(core: EngineCore, operation: str, args: list[Any]) -> Any:
    return core.scheduler.operations.run(operation, args)


def call(llm: Any, operation: str, *args: Any) -> Any:
    """Run an operation of the scheduler in the engine of an `LLM`.

    Args:
        llm: `vllm.LLM`, in process or with an engine-core process.
        operation: one of `operations.OPERATIONS`.
        args: of the method of `Operations`; plain data.
    """
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    if core is not None:  # in process
        return _run(core, operation, list(args))
    return client.call_utility(_METHOD, operation, list(args))


def of_workers(llm: Any, method: str, *args: Any) -> list[Any]:
    """Run a method of the workers of an `LLM` after the steps that are planned; an answer each."""
    answers: list[Any] = llm.collective_rpc(method, args=args)
    return answers


async def of_workers_async(async_llm: Any, method: str, *args: Any) -> list[Any]:
    """Like `of_workers`, for `vllm.AsyncLLM`."""
    answers: list[Any] = await async_llm.collective_rpc(method, args=args)
    return answers


async def call_async(async_llm: Any, operation: str, *args: Any) -> Any:
    """Like `call`, for `vllm.AsyncLLM`."""
    return await async_llm.engine_core.call_utility_async(_METHOD, operation, list(args))

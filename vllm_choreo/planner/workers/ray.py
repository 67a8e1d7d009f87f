# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors, each with an engine of its own, on one node or many.

    with ray_workers(2, make_engine) as workers:
        result = invoke(graph, workers)

An actor that dies is started again by Ray; its messages are gone, and the calls that it was running
are made again. Calls that an actor has at a time are bounded by its worker's width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from vllm_choreo.errors import EngineRestartedError, UnknownMessageError
from vllm_choreo.planner.logical.values import PromptTurns
from vllm_choreo.planner.workers.facade import AnyFacade, as_worker
from vllm_choreo.planner.workers.worker import (
    DEFAULT_WIDTH,
    Answer,
    HeldMessage,
    ReadMessage,
    Uri,
    Worker,
)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_RESTART_SECONDS = 300.0  # until an engine is loaded again


@dataclass(frozen=True)
class ActorMessage:
    """A message that an actor holds."""

    id: str
    num_tokens: int


class EngineActor:
    """Actor that runs a worker over the facade or worker that `make` returns."""

    def __init__(self, make: Callable[[], AnyFacade | Worker], width: int) -> None:
        self._worker: Worker = as_worker(make())
        self._worker.width = width
        self._held: dict[str, HeldMessage] = {}

    def about(self) -> tuple[bool, float, object, PromptTurns | None, int]:
        """Return `reads_messages`, `min_moved_tokens`, `identity`, `turns` and the process id."""
        import os

        worker = self._worker
        about = worker.reads_messages, worker.min_moved_tokens, worker.identity
        return *about, getattr(worker, "turns", None), os.getpid()

    async def prefill(self, text: str, parents: Sequence[ReadMessage], exact: bool) -> ActorMessage:
        """Encode a message, and hold it."""
        return self._hold(await self._worker.prefill(text, self._parents(parents), exact))

    async def decode(
        self, header: str, parents: Sequence[ReadMessage], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer:
        """Generate an answer, and hold its message."""
        answer = await self._worker.decode(header, self._parents(parents), exact, sampling)
        held = None if answer.message is None else self._hold(answer.message)
        return replace(answer, message=held)

    async def pin(self, messages: Sequence[ActorMessage]) -> None:
        """Pin messages."""
        await self._worker.pin([self._message(message) for message in messages])

    async def free(self, messages: Sequence[ActorMessage]) -> None:
        """Free messages; those that a former process held are gone already."""
        held = [self._held.pop(message.id, None) for message in messages]
        await self._worker.free([message for message in held if message is not None])

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text; None: they are not known here."""
        return await self._worker.tokenize(text)

    async def give(self, message: ActorMessage) -> Any:
        """Return a message with its keys and values, for another worker."""
        return await self._worker.give(self._message(message))

    async def take(self, given: Any) -> ActorMessage:
        """Hold a message that another worker gave."""
        return self._hold(await self._worker.take(given))

    async def save(self, messages: Sequence[ActorMessage], uri: Uri) -> None:
        """Keep messages, with keys and values, in a folder."""
        await self._worker.save([self._message(message) for message in messages], uri)

    async def load(self, uri: Uri) -> list[tuple[tuple[str, ...], ActorMessage]]:
        """Load kept messages, and hold them; return each behind its texts."""
        return [(texts, self._hold(message)) for texts, message in await self._worker.load(uri)]

    def _hold(self, message: HeldMessage) -> ActorMessage:
        self._held[message.id] = message
        return ActorMessage(message.id, message.num_tokens)

    def _message(self, named: HeldMessage) -> HeldMessage:
        if named.id not in self._held:
            raise UnknownMessageError(
                "the worker that held this message was started again", parameter="parents",
                value=named.id,
            )  # fmt: skip
        return self._held[named.id]

    def _parents(self, parents: Sequence[ReadMessage]) -> list[ReadMessage]:
        return [
            (self._message(parent[0]), parent[1], parent[2])
            if isinstance(parent, tuple)
            else self._message(parent)
            for parent in parents
        ]


class RayWorker:
    """A `Worker` in the planner's process that passes all calls to an actor."""

    def __init__(self, actor: ActorHandle, width: int) -> None:
        import ray

        self.width = width
        self._actor = actor
        about = ray.get(actor.about.remote())
        self.reads_messages, self.min_moved_tokens, self._identity, self._turns, self.pid = about

    @property
    def identity(self) -> object:
        return self._identity

    @property
    def turns(self) -> PromptTurns | None:
        return self._turns

    async def prefill(self, text: str, parents: Sequence[ReadMessage], exact: bool) -> ActorMessage:
        """Encode a message."""
        message: ActorMessage = await self._ask("prefill", text, list(parents), exact)
        return message

    async def decode(
        self, header: str, parents: Sequence[ReadMessage], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer:
        """Generate an answer. Raises EngineRestartedError: the actor died, and is there again."""
        answer: Answer = await self._ask("decode", header, list(parents), exact, dict(sampling))
        return answer

    async def pin(self, messages: Sequence[HeldMessage]) -> None:
        """Pin messages."""
        await self._ask("pin", list(messages))

    async def free(self, messages: Sequence[HeldMessage]) -> None:
        """Free messages."""
        if messages:
            await self._ask("free", list(messages))

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text; None: they are not known there."""
        ids: tuple[int, ...] | None = await self._ask("tokenize", text)
        return ids

    async def give(self, message: HeldMessage) -> list[ObjectRef]:
        """Return a reference to a message in Ray's object store, which passes it between nodes."""
        return [self._actor.give.remote(message)]

    async def take(self, given: list[ObjectRef]) -> ActorMessage:
        """Load a message that another worker gave."""
        message: ActorMessage = await self._ask("take", given[0])
        return message

    async def save(self, messages: Sequence[HeldMessage], uri: Uri) -> None:
        """Keep messages, with keys and values, in a folder of the actor's node."""
        await self._ask("save", list(messages), uri)

    async def load(self, uri: Uri) -> list[tuple[tuple[str, ...], HeldMessage]]:
        """Load kept messages of the actor's node; return each behind its texts."""
        found: list[tuple[tuple[str, ...], HeldMessage]] = await self._ask("load", uri)
        return found

    async def _ask(self, method: str, *args: object) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            await self._wait_for_restart()
            raise EngineRestartedError(
                "the worker died and was started again; make the call again"
            ) from error

    async def _wait_for_restart(self) -> None:
        """Wait until the actor answers again. Raises RayActorError: it does not."""
        from ray.exceptions import RayActorError

        async with asyncio.timeout(_RESTART_SECONDS):
            while True:
                try:
                    *_, self.pid = await self._actor.about.remote()
                    return
                except RayActorError as error:
                    if getattr(error, "preempted", False):
                        raise
                    await asyncio.sleep(0.2)


class RayWorkers(Sequence[RayWorker]):
    """Workers whose actors end with the `with` block."""

    def __init__(self, workers: Sequence[RayWorker], group: PlacementGroup, started: bool) -> None:
        self._workers, self._group, self._started = list(workers), group, started

    @overload
    def __getitem__(self, number: int) -> RayWorker: ...

    @overload
    def __getitem__(self, number: slice) -> list[RayWorker]: ...

    def __getitem__(self, number: int | slice) -> RayWorker | list[RayWorker]:
        return self._workers[number]

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End the actors, and Ray, if it was started for them."""
        import ray
        from ray.util import remove_placement_group

        for worker in self._workers:
            ray.kill(worker._actor)
        remove_placement_group(self._group)
        self._workers = []
        if self._started:
            ray.shutdown()

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def ray_workers(
    num_workers: int,
    make: Callable[[], AnyFacade | Worker],
    *,
    width: int = DEFAULT_WIDTH,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    strategy: str = "PACK",
    env: Mapping[str, str] | None = None,
) -> RayWorkers:
    """Start workers. Ray is started on this machine unless the program is connected already.

    Args:
        num_workers: number of workers.
        make: returns a facade or a worker, in the actor's process; it is pickled. With an engine in
            the actor's own process (`vllm.LLM` with VLLM_ENABLE_V1_MULTIPROCESSING=0) nothing is
            left behind whatever ends the actor.
        width: calls of a worker at a time.
        num_cpus, num_gpus: CPUs and GPUs of each worker.
        strategy: strategy of Ray's placement group: "PACK" on few nodes, "SPREAD" over many.
        env: environment variables of the actors.
    """
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    started = not ray.is_initialized()
    if started:
        cpus = max(1, int(num_workers * num_cpus + 0.999))
        # Not "whatever cluster runs here": that refuses a number of CPUs.
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    bundle = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
    group = placement_group([bundle] * num_workers, strategy=strategy)
    ray.get(group.ready())
    actor_type = ray.remote(EngineActor)
    actors = [
        actor_type.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,
            runtime_env={"env_vars": dict(env or {})},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
        ).remote(make, width)
        for i in range(num_workers)
    ]
    return RayWorkers([RayWorker(actor, width) for actor in actors], group, started)

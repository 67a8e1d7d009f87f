# SPDX-License-Identifier: Apache-2.0
"""`ServeClient` over real replicas whose engines' cores are played, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayTaskError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.cluster.client import ServeClient, connect
from vllm_choreo.cluster.engine import EngineReplica
from vllm_choreo.cluster.identity import CACHE_NUMBERS, EngineInfo, this_machine
from vllm_choreo.cluster.members import Members
from vllm_choreo.errors import UnsupportedOptionError

IDENTITY = {"model": "m"}


class PlayedCore:
    """An engine's core, which answers when it is told to.

    Attributes:
        requests: ids of the requests that it has.
        log: utilities that it ran.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request.request_id)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests.remove(request_id)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.log.append((method, *args))
        if method == "add_lora":
            raise ValueError("no such adapter")
        if args[:1] == ("snapshot_describe",):
            return {"ticket": 7}
        return 8 if args[:1] == ("snapshot_begin",) else ("done", method)

    async def get_output_async(self) -> Any:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def answer(self, request_id: str, token: int, *, is_last: bool = False) -> None:
        reason = FinishReason.LENGTH if is_last else None
        output = EngineCoreOutput(request_id, [token], finish_reason=reason)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=1.0))
        if is_last:
            self.requests.remove(request_id)

    def shutdown(self) -> None:
        self.requests.clear()

    def end(self) -> None:
        self._outputs.put_nowait(EngineDeadError())


class PlayedStream:
    """A stream of Serve's; it breaks when its replica is killed, or when it is cancelled."""

    def __init__(self, generator: Any, killed: asyncio.Event) -> None:
        self._generator, self._killed = generator, killed
        self._cancelled = asyncio.Event()

    def __aiter__(self) -> PlayedStream:
        return self

    async def __anext__(self) -> Any:
        work = _unless(self._cancelled, self._generator.__anext__())
        return _copy(await _unless(self._killed, work))

    def cancel(self) -> None:
        self._cancelled.set()


async def _unless(killed: asyncio.Event, work: Coroutine[Any, Any, Any]) -> Any:
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(killed.wait())
    await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
    if killed.is_set():
        task.cancel()
        await asyncio.wait({task})
        raise RuntimeError("the actor died")
    end.cancel()
    return task.result()


async def _told_by_ray(work: Coroutine[Any, Any, Any]) -> Any:
    """Raise what a method has raised as Ray does: as an error of a task, with its cause."""
    try:
        return await work
    except (EngineDeadError, ValueError) as error:
        raise RayTaskError("method", "traceback", error).as_instanceof_cause() from None


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class PlayedServe:
    """Replicas, and the handle by which they are called: what these raise is Ray's then."""

    def __init__(self) -> None:
        self.cores: dict[str, PlayedCore] = {}
        self.members = Members()
        self._replicas: dict[str, tuple[EngineReplica, asyncio.Event]] = {}
        self._stopped: set[str] = set()

    def start(self, name: str, model: str = "m") -> None:
        replica = EngineReplica.__new__(EngineReplica)
        self.cores[name] = PlayedCore()
        cache = {**dict.fromkeys(CACHE_NUMBERS, 32), "num_gpu_blocks": 10}
        info = EngineInfo(name, {"model": model}, cache, this_machine())
        files: Any = None  # nothing is moved here
        replica._begin(self.cores[name], info, files)  # type: ignore[arg-type]
        self._replicas[name] = (replica, asyncio.Event())
        self._tell()

    def stop(self, name: str) -> None:
        """Route no more requests to a replica."""
        self._stopped.add(name)
        self.members.update([other for other in self._replicas if other != name])

    def kill(self, name: str) -> None:
        self._replicas.pop(name)[1].set()
        self._tell()

    def _tell(self) -> None:
        self.members.update(list(self._replicas))

    def options(self, **_: Any) -> PlayedServe:
        return self

    def __getattr__(self, method: str) -> Any:
        def remote(name: str, *args: Any, **options: Any) -> Any:
            if name not in self._replicas or name in self._stopped:
                raise EngineDeadError  # of another one, to which it went
            replica, killed = self._replicas[name]
            called = getattr(replica, method)(name, *_copy(args), **options)
            if method == "run":
                return PlayedStream(called, killed)
            return _told_by_ray(_unless(killed, called))

        return SimpleNamespace(remote=remote)


async def _client(played: PlayedServe, places: int = 2) -> ServeClient:
    reach = partial(connect, played, owner="me", identity=IDENTITY)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=places), cache_config=SimpleNamespace()
    )
    first = [await reach(next(iter(played.cores)))]
    executor: Any = None
    return ServeClient(config, executor, True, first=first, members=played.members, connect=reach)


def _request(name: str, rank: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=rank,
    )


async def _next(client: ServeClient) -> list[tuple[str, list[int], Any]]:
    """The next outputs; those of steps are left out."""
    while True:
        outputs = await client.get_output_async()
        if outputs.outputs:
            return [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs.outputs]


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def _run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_requests_go_to_their_engines_and_answers_come_back() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        played.start("b")
        await _until(lambda: client.alive == [0, 1])
        assert client.vllm_config.cache_config.num_gpu_blocks == 20
        for name, rank in (("x", 0), ("y", 1)):
            await client.add_request_async(_request(name, rank))
        assert [core.requests for core in played.cores.values()] == [["x"], ["y"]]
        played.cores["b"].answer("y", 7)
        assert await _next(client) == [("y", [7], None)]
        played.cores["a"].answer("x", 8, is_last=True)
        assert await _next(client) == [("x", [8], FinishReason.LENGTH)]
        await client.abort_requests_async(["y"])
        assert played.cores["b"].requests == []
        assert await client.call_utility_all_async("go", 1) == [("done", "go")] * 2

    _run(main())


@pytest.mark.parametrize("how", ["kill", "end"])
def test_an_engine_that_ends_gives_back_what_it_had(how: str) -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        await client.add_request_async(_request("x", 0))
        if how == "kill":
            played.kill("a")
        else:
            played.cores["a"].end()
        assert await _next(client) == [("x", [], FinishReason.ERROR)]
        await _until(lambda: client.alive == [])
        if how == "end":  # Serve ends a replica whose engine has ended
            played.kill("a")
        played.start("b")
        await _until(lambda: client.alive)
        (engine,) = client.alive
        assert client.starts[engine] == 2
        await client.add_request_async(_request("z", engine))
        played.cores["b"].answer("z", 1, is_last=True)
        assert await _next(client) == [("z", [1], FinishReason.LENGTH)]

    _run(main())


def test_an_error_of_a_method_ends_no_engine() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        with pytest.raises(ValueError, match="no such adapter"):
            await client.call_utility_async("add_lora", "x")
        assert client.alive == [0]
        assert client.starts == [1, 0]
        assert await client.call_utility_async("go") == ("done", "go")

    _run(main())


def test_an_ingress_that_ends_leaves_no_save_or_load() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        one = await connect(played, "a", "one", IDENTITY)  # type: ignore[arg-type]
        for operation, *args in (
            ("snapshot_describe", "s", ["s/0"]),
            ("snapshot_begin", "moves", "us", {}, {}),
            ("snapshot_describe", "s", ["s/1"]),
        ):
            await one.call_utility_async("choreo", operation, args)
            if args[-1] == ["s/0"]:
                await one.call_utility_async("choreo", "snapshot_release_ticket", [7])
        log = played.cores["a"].log
        del log[:]
        await connect(played, "a", "one", IDENTITY)  # type: ignore[arg-type]
        assert sorted(log) == [
            ("choreo", "close", ["moves"]),
            ("choreo", "snapshot_abort", [8]),
            ("choreo", "snapshot_release_ticket", [7]),
        ]

    _run(main())


def test_an_engine_that_is_stopped_ends_what_it_has() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        for name in ("x", "y"):
            await client.add_request_async(_request(name, 0))
        played.stop("a")
        await _until(lambda: client.alive == [])
        await asyncio.sleep(1.2)  # longer than a replica waits that is looked after
        for token in (3, 4):
            played.cores["a"].answer("x", token)
            assert await _next(client) == [("x", [token], None)]
        await client.abort_requests_async(["x"])
        await _until(lambda: played.cores["a"].requests == ["y"])
        played.cores["a"].answer("y", 5, is_last=True)
        assert await _next(client) == [("y", [5], FinishReason.LENGTH)]
        await _until(lambda: client._leaving == [])

    _run(main())


def test_an_engine_of_another_model_is_not_used() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        played.start("other", model="n")
        played.start("b")
        played.kill("other")
        await _until(lambda: client.alive == [0, 1])
        assert {c.info.replica for c in client.clients if c is not None} == {"a", "b"}
        played.start("other", model="n")
        with pytest.raises(UnsupportedOptionError, match="have the same model"):
            await connect(played, "other", "me", IDENTITY)  # type: ignore[arg-type]

    _run(main())


def test_more_engines_than_places_wait_for_one() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        client = await _client(played)
        played.start("b")
        played.start("c")
        await _until(lambda: client.alive == [0, 1])
        played.kill("a")
        await _until(
            lambda: {c.info.replica for c in client.clients if c is not None} == {"b", "c"}
        )

    _run(main())


def test_a_session_that_is_taken_over_is_forgotten_first() -> None:
    async def main() -> None:
        played = PlayedServe()
        played.start("a")
        replica, _ = played._replicas["a"]
        for number, owner in enumerate(("one", "one", "two", "two")):
            request = _request(f"x{number}", 0)
            request.sampling_params.extra_args = {"choreo": {"save_as": f"s/{number}"}}
            await anext(replica.run("a", owner, request))
        assert played.cores["a"].log == [("choreo", "close", ["s"])]
        await replica.watch("a", "two", is_first=True)
        assert played.cores["a"].log == [("choreo", "close", ["s"])] * 2

    _run(main())

# SPDX-License-Identifier: Apache-2.0
"""Sessions over several engines that are played: each checks that it knows what a call names.

What an engine makes of a call is a digest of all that the call reads, so an answer made from
anything else than what its recipe says is another one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.config import ServerConfig
from vllm_choreo.engine import fleet_client
from vllm_choreo.engine.fleet_client import FleetClient, _Resources
from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    LimitError,
    ParentFailedError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.session_options import SessionOptions

VOCAB = 500


class PlayedEngine:
    """An engine that knows messages by their digests.

    Attributes:
        messages: digest of each message's recipe, by session and id.
        log: what was asked of it.
        refuses: names of messages that it does not make.
    """

    def __init__(self) -> None:
        self.messages: dict[tuple[str, str], bytes] = {}
        self.pinned: set[str] = set()
        self.log: list[tuple[str, Any]] = []
        self.refuses: set[str] = set()
        self.resources = _Resources()

    def make(self, prompt: list[int], params: Any) -> tuple[list[int], dict[str, Any]]:
        """The generated tokens of a call, and the report on it."""
        call = params.extra_args["choreo"]
        session, name = call["session"], call["save_as"]
        self.log.append((call["kind"], name.partition("/")[2]))
        if name.partition("/")[2] in self.refuses:
            return [], {"choreo_error": LimitError("no room").to_report()}
        for parent, _, _ in call["parents"]:
            if parent.partition("/")[2] in self.refuses:
                return [], {"choreo_error": ParentFailedError("refused").to_report()}
            if (session, parent) not in self.messages:
                return [], {"choreo_error": UnknownMessageError("not here").to_report()}
        if (session, name) in self.messages:
            return [], {"choreo_error": ChoreoError(f"taken: {name}").to_report()}
        reads = [(self.messages[session, p], start, stop) for p, start, stop in call["parents"]]
        offsets, new_offset = call["offsets"] or [], call["new_offset"] or 0
        context = repr((reads, offsets, new_offset, call.get("exact")))
        generated = []
        if call["kind"] == "decode":
            draw = random.Random(context + repr(prompt))
            generated = [draw.randrange(VOCAB) for _ in range(params.max_tokens)]
        digest = blake2b((context + repr([*prompt, *generated])).encode()).digest()
        self.messages[session, name] = digest
        report = {"position": 0, "exact": True, "reused_tokens": 0, "repositioned_tokens": 0}
        return generated or [0], {"choreo": {**report, "encoded_tokens": len(prompt)}}

    async def call_utility_async(self, method: str, operation: str, args: list[Any]) -> Any:
        await asyncio.sleep(0)
        self.log.append((operation, args[1:]))
        session = args[0]
        if operation == "free":
            for name in args[1]:
                found = self.messages.pop((session, name), None)
                # Of a move that failed there is nothing.
                assert found is not None or session.startswith("moves-")
        elif operation == "close":
            for key in [key for key in self.messages if key[0] == session]:
                del self.messages[key]
        elif operation in ("pin", "unpin"):
            for name in args[1]:
                assert (session, name) in self.messages
            self.pinned |= set(args[1])
        elif operation == "counts":
            return {"num_messages": len(self.messages), "num_pinned": len(self.pinned)}
        return None


class PlayedClient(FleetClient):
    """A client whose engines are played, and start again when they are told to."""

    def __init__(self, count: int) -> None:
        self.engine_ranks_managed = list(range(count))
        self.resources = _Resources()
        self.starts, self.lives, self.watcher = [1] * count, {}, None
        self.clients = [PlayedEngine() for _ in range(count)]

    def end(self, engine: int) -> None:
        self.clients[engine] = None
        self.watcher.on_end(engine)

    def start(self, engine: int) -> None:
        self.clients[engine] = PlayedEngine()
        self.starts[engine] += 1
        self.watcher.on_start(engine)


class Queue:
    """Outputs of one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, token_ids: list[int], report: Any = None, reason: str | None = None) -> None:
        completion = SimpleNamespace(
            token_ids=token_ids, text="", logprobs=None, finish_reason=reason
        )
        self._outputs.put_nowait(
            SimpleNamespace(
                outputs=[completion],
                prompt_logprobs=None,
                kv_transfer_params=report,
                finished=reason is not None,
                metrics=None,
            )
        )

    def get_nowait(self) -> None:
        return None

    async def get(self) -> Any:
        return await self._outputs.get()

    def close(self) -> None: ...


class PlayedLLM:
    """An AsyncLLM over played engines.

    Attributes:
        before_end: called with a request's message and engine before it is answered.
    """

    def __init__(self, count: int, model_config: Any) -> None:
        self.engine_core = PlayedClient(count)
        cache = SimpleNamespace(num_gpu_blocks=count * 100, block_size=32, cache_dtype="auto")
        self.vllm_config = SimpleNamespace(
            cache_config=cache,
            additional_config={},
            model_config=model_config,
            lora_config=None,
            speculative_config=None,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            load_config=SimpleNamespace(load_format="auto"),
        )
        self._answers: set[asyncio.Task[None]] = set()
        self.before_end: Any = lambda name, engine: None

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def abort(self, request_id: str, internal: bool) -> None: ...

    async def add_request(
        self, name: str, prompt: Any, params: Any, *, lora_request: Any, data_parallel_rank: int
    ) -> Queue:
        queue = Queue(name)
        life = self.engine_core.lives.pop((name, data_parallel_rank))
        answer = asyncio.create_task(self._answer(queue, prompt, params, data_parallel_rank, life))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return queue

    async def _answer(self, queue: Queue, prompt: Any, params: Any, rank: int, life: int) -> None:
        client = self.engine_core
        engine = client.clients[rank]
        is_there = engine is not None and life == client.starts[rank]
        if is_there:
            await asyncio.sleep(0)
            self.before_end(queue.request_id.partition("/")[2], rank)
        if not is_there or client.clients[rank] is not engine:
            error = EngineRestartedError("it has ended").to_report()
            return queue.put([], {"choreo_error": error}, "error")
        tokens, report = engine.make(prompt["prompt_token_ids"], params)
        queue.put(tokens, report, "error" if "choreo_error" in report else "length")


@pytest.fixture(scope="module")
def model_config(tiny_model_path: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    path: Path = tiny_model_path("llama")
    return EngineArgs(str(path), dtype="float32", max_model_len=1024).create_model_config()


@pytest.fixture
def fleet_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged of the fleet; vLLM's loggers hand on nothing."""
    logger = logging.getLogger("vllm.choreo.fleet")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)  # servers of other tests log less
    handed_on, logger.propagate = logger.propagate, False  # else each line may come twice
    yield caplog
    logger.propagate = handed_on
    logger.removeHandler(caplog.handler)


def greedy(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **options})


async def _workflow(c: AsyncChoreography) -> list[tuple[int, ...]]:
    a, b = await c.prefill([{"tokens": [1, 2]}, {"tokens": [3]}])
    d = await c.decode([5], parents=[a, b], sampling_params=greedy())
    await c.free(a)
    e = await c.decode([6], parents=[(d, 1, None), b], offsets=[3, 9], sampling_params=greedy())
    await c.free(b)
    pending = await c.submit(header=[7], parents=[d, e], sampling_params=greedy())
    f = await c.decode([8], parents=[pending, d], sampling_params=greedy())
    return [m.token_ids for m in (d, e, await pending, f)]


def _run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_answers_do_not_depend_on_engines_or_on_their_ends(model_config: Any) -> None:
    async def main(count: int, seed: int, share: float) -> list[Any]:
        llm, rng = PlayedLLM(count, model_config), random.Random(seed)
        client = llm.engine_core

        def before_end(name: str, engine: int) -> None:
            if rng.random() < share:
                client.end(engine)
                asyncio.get_running_loop().call_later(0.01, client.start, engine)

        llm.before_end = before_end
        sessions = [AsyncChoreography(llm) for _ in range(4)]
        found = await asyncio.gather(*map(_workflow, sessions), return_exceptions=True)
        for session in sessions:
            await session.close()
        left = [engine for engine in client.clients if engine is not None and engine.messages]
        assert not left
        return found

    (expected, *_) = _run(main(1, 0, 0.0))
    num_lost = 0
    for seed in range(30):
        for found in _run(main(1 + seed % 3, seed, 0.04)):
            # Of a call that was running when three engines ended, and of those that read it.
            is_lost = isinstance(found, (EngineRestartedError, ParentFailedError))
            assert is_lost or found == expected
            num_lost += is_lost
    assert num_lost <= 6


def test_what_is_missing_is_made_again_with_what_it_was_made_behind(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        client, c = llm.engine_core, AsyncChoreography(llm)
        await c.prefill([1, 2], save_as="a")
        await c.prefill([3], parents=["a"], save_as="b")
        await c.free("a")
        (home,) = [e for e in range(2) if client.clients[e].messages]
        client.end(home)
        await c.decode([4], parents=["b"], save_as="d", sampling_params=greedy())
        log = [entry for entry in client.clients[1 - home].log if entry[0] != "free"]
        assert log == [("prefill", "a"), ("prefill", "b"), ("decode", "d")]
        names = {name.partition("/")[2] for _, name in client.clients[1 - home].messages}
        assert names == {"b", "d"}, "what was freed is freed again"

    _run(main())


def test_a_call_that_ends_engines_is_not_made_again_for_ever(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        client, c = llm.engine_core, AsyncChoreography(llm)

        def before_end(name: str, engine: int) -> None:
            client.end(engine)
            client.start(engine)

        llm.before_end = before_end
        with pytest.raises(EngineRestartedError, match="3 engines have ended"):
            await c.prefill([1])
        assert sum(client.starts) == 5

    _run(main())


def test_a_sampled_answer_that_was_seen_is_not_made_again(model_config: Any) -> None:
    async def main(**options: Any) -> list[int]:
        llm = PlayedLLM(2, model_config)
        client, c = llm.engine_core, AsyncChoreography(llm)
        add = llm.add_request

        async def add_request(*args: Any, **named: Any) -> Queue:
            queue = await add(*args, **named)
            queue.put([9])  # a token is seen
            return queue

        llm.add_request = add_request  # type: ignore[method-assign]
        llm.before_end = lambda name, engine: (
            sum(client.starts) == 2
            and (
                client.end(engine),
                client.start(engine),
            )
        )
        await c.decode([4], sampling_params=greedy(**options))
        return client.starts

    assert sum(_run(main())) == sum(_run(main(temperature=1.0, seed=3))) == 3
    with pytest.raises(EngineRestartedError, match="what was sampled"):
        _run(main(temperature=1.0))


def test_pins_count_once_and_follow_a_message(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        client, c = llm.engine_core, AsyncChoreography(llm)
        a = await c.prefill([1, 2])
        await c.pin(a)
        assert (await c.counts())["num_pinned"] == 1
        (home,) = [e for e in range(2) if client.clients[e].messages]
        client.end(home)
        await c.decode([4], parents=[a], sampling_params=greedy())
        assert client.clients[1 - home].pinned == {a.id}
        client.end(1 - home)
        client.start(home)
        await c.pin(a)
        assert client.clients[home].pinned == {a.id}, "no engine had it"
        client.start(1 - home)
        long = await c.prefill([{"tokens": [7 + i] * 900} for i in range(4)])
        with pytest.raises(LimitError, match="of the engines together"):
            await c.pin(*long)

    _run(main())


def test_sessions_of_a_tenant_find_what_others_encoded(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(3, model_config)
        first = AsyncChoreography(llm, tenant="t")
        document = await first.prefill([1] * 500)
        (home,) = [e for e in range(3) if llm.engine_core.clients[e].messages]
        for tenant, is_same in (("t", True), ("u", False)):
            c = AsyncChoreography(llm, tenant=tenant)
            same = await c.prefill([1] * 500)
            recipe = c._runner._recipes[same.id]  # type: ignore[attr-defined]
            other = first._runner._recipes[document.id]  # type: ignore[attr-defined]
            assert (recipe.key == other.key) == is_same
        assert home in fleet_of(llm).homes.of(other.key)  # type: ignore[arg-type, union-attr]

    _run(main())


def test_what_cannot_be_moved_is_encoded(
    model_config: Any, fleet_log: pytest.LogCaptureFixture
) -> None:
    """Played engines save nothing, so each move fails; after some, none is tried."""

    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        fleet, c = fleet_of(llm), AsyncChoreography(llm)  # type: ignore[arg-type]
        assert fleet is not None
        for number in range(8):
            document = await c.prefill([number] * 100)
            first = await c.decode([4], parents=[document], sampling_params=greedy())
            (home,) = fleet.homes.of(c._runner._recipes[document.id].key)  # type: ignore[attr-defined]
            fleet.loads.add(home, 1e6)
            again = await c.decode([4], parents=[document], sampling_params=greedy())
            assert again.generated_token_ids == first.generated_token_ids
            fleet.loads.add(home, -1e6)
            await c.free(document, first, again)
        assert (fleet.mover.total.moved, fleet.mover.total.failed) == (0, 5)
        assert sum(fleet.num_again) == 8 and not fleet.measured.can_move
        assert fleet.homes.used(0) == fleet.homes.used(1) == 0, "what is freed lies nowhere"
        states = fleet.describe()
        assert sum(state.encoded_again_tokens for state in states) == 800
        assert sum(state.moves.failed for state in states) == 5
        await c.close()

    _run(main())
    assert fleet_log.text.count("nothing was moved to engine") == 5
    assert "from now on nothing is moved" in fleet_log.text


def test_a_folder_that_cannot_be_written_is_refused(model_config: Any, tmp_path: Path) -> None:
    llm = PlayedLLM(2, model_config)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        llm.vllm_config.additional_config = {"choreo": {"move_folder": str(folder)}}
        with pytest.raises(ChoreoError, match="cannot be moved through this folder") as refused:
            fleet_of(llm)  # type: ignore[arg-type]
        assert refused.value.parameter == "additional_config.choreo.move_folder"
        assert refused.value.value == str(folder)
    llm.vllm_config.additional_config = {"choreo": {"move_folder": str(tmp_path)}}
    fleet_of(llm)  # type: ignore[arg-type]
    (made,) = tmp_path.glob("vllm-choreo-moves-*")
    assert made.stat().st_mode & 0o777 == 0o700
    del llm, refused  # whose traceback has the client
    gc.collect()
    assert not made.exists(), "it ends with the engines"


def test_an_engine_of_another_model_or_version_does_not_start(
    model_config: Any, monkeypatch: pytest.MonkeyPatch, fleet_log: pytest.LogCaptureFixture
) -> None:
    """What lies on the disk was replaced while the server ran."""
    before = fleet_client.identity_of(model_config.model)
    assert before["model"] and before["tokenizer"] and before["vllm-choreo"]

    async def main(changed: str) -> list[int]:
        client = PlayedClient(2)
        client.vllm_config = SimpleNamespace(model_config=model_config)  # type: ignore[assignment]
        client._identity, client._lost = before, set()
        now = {**before, changed: "another"}
        monkeypatch.setattr(fleet_client, "identity_of", lambda model: now)
        await client._start_again(1)
        assert client._lost == {1} and not client.resources.engine_dead
        return client.starts

    for changed in ("model", "vllm-choreo"):
        fleet_log.clear()
        assert asyncio.run(main(changed)) == [1, 1]
        assert f"{changed} changed since the server started" in fleet_log.text


def test_what_several_engines_cannot_do_is_refused(model_config: Any) -> None:
    async def main() -> None:
        c = AsyncChoreography(PlayedLLM(2, model_config))
        a = await c.prefill([1, 2])
        with pytest.raises(UnsupportedOptionError, match="measured when it runs"):
            await c.prefill([3], parents=[a], repair={"share": 0.4, "by": "attention"})

    _run(main())


def test_limits_of_a_session_count_over_all_engines(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        options = SessionOptions(tenant="t", limits=ServerConfig(max_tokens_per_session=250))
        c = AsyncChoreography(llm, options=options)
        parts = [await c.prefill([7] * 100)]
        engine, fleet = c.engine_of(parts[0]), fleet_of(llm)  # type: ignore[arg-type]
        assert engine is not None and fleet is not None
        fleet.loads.add(engine, 1.0)  # else what is given lies together
        parts.append(await c.prefill([8] * 100))
        assert [len(engine.messages) for engine in llm.engine_core.clients] == [1, 1]
        with pytest.raises(LimitError, match="may hold 250 tokens") as refused:
            await c.prefill([9] * 100)
        assert refused.value.value == "300 tokens"
        await c.free(parts[0])
        await c.prefill([9] * 100)

    _run(main())

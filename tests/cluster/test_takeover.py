# SPDX-License-Identifier: Apache-2.0
"""One ingress goes on for another: played ingresses and engines, and the real journal."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytest.importorskip("ray")

from tests.api.test_fleet import PlayedLLM, greedy
from tests.api.test_fleet import model_config as model_config
from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.cluster.journal import JournalActor, JournalWriter
from vllm_choreo.cluster.takeover import Takeover
from vllm_choreo.config import ServerConfig
from vllm_choreo.errors import FreedMessageError
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.server.sessions import Sessions
from vllm_choreo.server.tenants import tenant_of

Step = Callable[[AsyncChoreography], Awaitable[Any]]


class PlayedActor:
    """A journal as a handle of Ray's shows it: all that goes in and out is pickled."""

    def __init__(self) -> None:
        self.actor = JournalActor()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            async def remote(self, *args: Any) -> Any:
                await asyncio.sleep(0)
                await actor.may_answer.wait()
                args = pickle.loads(pickle.dumps(args))
                return pickle.loads(pickle.dumps(getattr(actor.actor, name)(*args)))

        return Method()


class Ingress:
    """An ingress with two engines of its own: what another one had made is in none of them."""

    def __init__(self, name: str, journal: Any, model_config: Any) -> None:
        self.llm = PlayedLLM(2, model_config)
        self.writer = JournalWriter(journal, name)
        self.lost: list[str] = []
        self.writer.on_lost = self.lost.append
        fleet = fleet_of(self.llm)
        assert fleet is not None
        fleet.journal = self.writer

    def open(self) -> AsyncChoreography:
        options = SessionOptions(tenant="us")
        session = AsyncChoreography(self.llm, options=options)
        self.writer.opened(session.session, options)
        return session

    async def take_over(self) -> AsyncChoreography:
        (record,) = await self.writer.take_over("us")
        session = AsyncChoreography(self.llm, options=record.options)
        self.writer.opened(session.session, record.options)
        session.restore(record)
        return session


def _steps() -> list[Step]:
    return [
        lambda c: c.prefill([{"tokens": [1, 2], "save_as": "a"}, {"tokens": [3], "save_as": "b"}]),
        lambda c: c.decode([5], parents=["a", "b"], save_as="d", sampling_params=greedy()),
        lambda c: c.free("a"),
        lambda c: c.decode(
            [6],
            parents=[("d", 1, None), "b"],
            offsets=[3, 9],
            save_as="e",
            sampling_params=greedy(),
        ),
        lambda c: c.reencode("d", parents=["b"], save_as="copy"),
        lambda c: c.free("b"),
        lambda c: c.decode([7], parents=["copy", "e"], sampling_params=greedy()),
        lambda c: c.prefill([8]),
    ]


async def _state(c: AsyncChoreography) -> list[Any]:
    """All of a session that a client can see."""
    return [
        (m.id.partition("/")[2], m.token_ids, m.text, m.parents, m.generated_token_ids, _history(m))
        for m in c.messages()
    ]


def _history(message: Any) -> list[str]:
    return sorted(name.partition("/")[2] for name in message.provenance)


def _plain(state: list[Any], session: str) -> str:
    return repr(state).replace(session, "S")


def _run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def _whole(model_config: Any, takeover_after: int | None) -> str:
    """What a client sees of all steps, if one ingress ends after some of them."""
    journal = PlayedActor()
    ingress = Ingress("a", journal, model_config)
    session = ingress.open()
    for number, step in enumerate(_steps()):
        await step(session)
        await ingress.writer.flush()
        if number == takeover_after:
            ingress = Ingress("b", journal, model_config)
            session = await ingress.take_over()
    with pytest.raises(FreedMessageError):
        session.message("a")
    return _plain(await _state(session), session.session)


def test_a_session_is_the_same_after_a_takeover(model_config: Any) -> None:
    expected = _run(_whole(model_config, None))
    for after in range(2, len(_steps())):
        assert _run(_whole(model_config, after)) == expected


def test_an_ingress_that_was_taken_over_writes_nothing(model_config: Any) -> None:
    async def main() -> None:
        journal = PlayedActor()
        first = Ingress("a", journal, model_config)
        session = first.open()
        await session.prefill([1], save_as="a")
        await first.writer.flush()
        assert first.lost == []
        second = Ingress("b", journal, model_config)
        taken = await second.take_over()
        await session.prefill([2], save_as="late")
        await first.writer.flush()
        assert first.lost == ["us"]
        await taken.prefill([3], save_as="b")
        await second.writer.flush()
        assert second.lost == []
        third = await Ingress("c", journal, model_config).take_over()
        assert [m.id.partition("/")[2] for m in third.messages()] == ["a", "b"]

    _run(main())


def test_what_is_written_outlives_who_waits_for_it(model_config: Any) -> None:
    async def main() -> None:
        journal = PlayedActor()
        first = Ingress("a", journal, model_config)
        session = first.open()
        await session.prefill([1], save_as="a")
        journal.may_answer.clear()
        waiting = asyncio.ensure_future(first.writer.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        journal.may_answer.set()
        await first.writer.flush()
        second = Ingress("b", journal, model_config)
        taken = await second.take_over()
        assert [m.id.partition("/")[2] for m in taken.messages()] == ["a"]
        await session.prefill([2], save_as="late")
        waiting = asyncio.ensure_future(first.writer.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        while not first.lost:
            await asyncio.sleep(0.01)
        assert first.lost == ["us"]

    _run(main())


def test_a_journal_that_ends_is_filled_again(model_config: Any) -> None:
    async def main() -> None:
        journal = PlayedActor()
        ingress = Ingress("a", journal, model_config)
        session = ingress.open()
        await session.prefill([1], save_as="a")
        await ingress.writer.flush()
        journal.actor = JournalActor()
        await session.prefill([2], save_as="b")
        await ingress.writer.flush()
        taken = await Ingress("b", journal, model_config).take_over()
        assert [m.token_ids for m in taken.messages()] == [(1,), (2,)]

    _run(main())


def test_a_session_that_is_closed_is_not_taken_over(model_config: Any) -> None:
    async def main() -> None:
        journal = PlayedActor()
        ingress = Ingress("a", journal, model_config)
        session = ingress.open()
        await session.prefill([1])
        ingress.writer.closed(session.session)
        await ingress.writer.flush()
        assert await Ingress("b", journal, model_config).writer.take_over("us") == []

    _run(main())


def _server(name: str, journal: Any, model_config: Any) -> httpx.AsyncClient:
    """A client of an ingress whose one route makes a message in the tenant's default session."""
    ingress = Ingress(name, journal, model_config)
    ingress.llm.model_config = model_config
    sessions = Sessions(ingress.llm, ServerConfig(), "m")
    sessions.journal = ingress.writer

    async def make(request: Request) -> JSONResponse:
        session = sessions.default_session(tenant_of(request))
        await session.choreography.prefill([len(session.choreography.messages())])
        made = [(m.id, m.token_ids) for m in session.choreography.messages()]
        return JSONResponse(made)

    app = Takeover(Starlette(routes=[Route("/", make)]), sessions, ingress.writer)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress")


def test_what_was_answered_outlives_the_ingress(model_config: Any) -> None:
    async def main() -> None:
        journal = PlayedActor()
        a, b = (_server(name, journal, model_config) for name in "ab")
        first = (await a.get("/")).json()
        second = (await b.get("/")).json()
        assert len(first) == 1
        assert second[:1] == first
        assert len(second) == 2
        late = await a.get("/")  # it has not heard of the takeover
        assert late.status_code == 503
        assert "another ingress" in late.text
        third = (await b.get("/")).json()
        assert third[:2] == second
        again = (await a.get("/")).json()
        assert again[:3] == third
        assert len({name for name, _ in again}) == 4

    _run(main())

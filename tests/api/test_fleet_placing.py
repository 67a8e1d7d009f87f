# SPDX-License-Identifier: Apache-2.0
"""Engines to which messages go that a session is given, over played engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.test_fleet import PlayedLLM, Queue, _run, greedy, model_config
from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.errors import ChoreoError, LimitError, ParentFailedError

__all__ = ["model_config"]  # fixture


def test_what_is_given_together_lies_together_until_its_engine_has_much_to_do(
    model_config: Any,
) -> None:
    async def main() -> None:
        llm = PlayedLLM(3, model_config)
        c = AsyncChoreography(llm)
        given = [{"tokens": [n] * 90} for n in range(9)]
        first = {c.engine_of(message) for message in await c.prefill(given)}
        assert len(first) == 1
        (engine,), fleet = first, fleet_of(llm)  # type: ignore[arg-type]
        assert fleet is not None
        fleet.loads.add(engine, fleet.measured.rates().encode * 2_000)
        assert c.engine_of(await c.prefill([10] * 90)) != engine

    _run(main())


def test_what_lies_somewhere_is_given_there(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(3, model_config)
        documents = [[n] * 90 for n in range(9)]
        homes = {}
        for number, tokens in enumerate(documents):
            c = AsyncChoreography(llm, tenant="t")
            homes[number] = c.engine_of(await c.prefill(tokens))
        assert len(set(homes.values())) == 3
        c = AsyncChoreography(llm, tenant="t")
        again = await c.prefill([{"tokens": tokens} for tokens in documents])
        assert {n: c.engine_of(message) for n, message in enumerate(again)} == homes

    _run(main())


def test_a_call_that_is_cancelled_between_placing_and_sending_leaves_nothing(
    model_config: Any,
) -> None:
    async def main() -> None:
        llm = PlayedLLM(2, model_config)
        client, c = llm.engine_core, AsyncChoreography(llm)
        pending = c.begin([4], sampling_params=greedy())
        assert await c.place(pending) in (0, 1) and len(client.lives) == 1
        await c.cancel([pending])
        assert not client.lives

        async def refuse(*args: Any, **named: Any) -> Queue:
            raise asyncio.CancelledError

        llm.add_request = refuse  # type: ignore[method-assign]
        with pytest.raises(ChoreoError):
            await c.prefill([1])
        assert not client.lives
        assert fleet_of(llm).queued == [0, 0]  # type: ignore[arg-type, union-attr]

    _run(main())


class GatedLLM(PlayedLLM):
    """Engines that answer when they are let; each waits for the parents that it is making.

    Attributes:
        handed: names of the messages whose calls engines were handed, with the engine.
        gates: what an answer waits for, by the message's name.
    """

    def __init__(self, count: int, model_config: Any) -> None:
        super().__init__(count, model_config)
        self.handed: list[tuple[str, int]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Event()
        self._answered: dict[tuple[str, int], asyncio.Event] = {}

    async def add_request(
        self, name: str, *args: Any, data_parallel_rank: int, **named: Any
    ) -> Any:
        self.handed.append((_short(name), data_parallel_rank))
        self._answered[name, data_parallel_rank] = asyncio.Event()
        self.changed.set()
        return await super().add_request(
            name, *args, data_parallel_rank=data_parallel_rank, **named
        )

    async def _answer(self, queue: Any, prompt: Any, params: Any, rank: int, life: int) -> None:
        for parent, _, _ in params.extra_args["choreo"]["parents"]:
            if (parent, rank) in self._answered:
                await self._answered[parent, rank].wait()
        if gate := self.gates.get(_short(queue.request_id)):
            await gate.wait()
        await super()._answer(queue, prompt, params, rank, life)
        self._answered[queue.request_id, rank].set()

    async def until_handed(self, *names: str) -> None:
        while not {*names} <= {name for name, _ in self.handed}:
            self.changed.clear()
            await self.changed.wait()


def _short(name: str) -> str:
    return name.partition("/")[2]


def _begin(c: Any, name: str, **options: Any) -> Any:
    params = {"sampling_params": greedy()} if "header" in options else {}
    return c.submit(save_as=name, **options, **params)


def test_a_call_goes_where_what_it_reads_is_being_made(model_config: Any) -> None:
    """Its engine waits for it: no answer has to come to the front before."""

    async def main() -> None:
        llm = GatedLLM(3, model_config)
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        llm.gates["document"] = asyncio.Event()
        document = await _begin(c, "document", tokens=[7] * 90)
        middle = await _begin(c, "middle", tokens=[8] * 40, parents=[document])
        answer = await _begin(c, "answer", header=[5], parents=[document, middle])
        last = await _begin(c, "last", header=[6], parents=[answer])
        await llm.until_handed("document", "middle", "answer")
        assert len({engine for _, engine in llm.handed}) == 1
        llm.gates["document"].set()
        found = [await document, await middle, await answer, await last]
        assert [name for name, _ in llm.handed] == ["document", "middle", "answer", "last"]
        again = AsyncChoreography(llm)  # type: ignore[arg-type]
        first = await again.prefill([7] * 90)
        second = await again.prefill([8] * 40, parents=[first])
        same = await again.decode([5], parents=[first, second], sampling_params=greedy())
        assert same.token_ids == found[2].token_ids
        for session in (c, again):
            await session.close()
        assert not any(engine.messages for engine in llm.engine_core.clients)

    _run(main())


def test_what_is_being_made_elsewhere_is_waited_for(model_config: Any) -> None:
    async def main() -> None:
        llm = GatedLLM(2, model_config)
        c, fleet = AsyncChoreography(llm), fleet_of(llm)  # type: ignore[arg-type]
        assert fleet is not None
        llm.gates.update(small=asyncio.Event(), large=asyncio.Event())
        small = await _begin(c, "small", tokens=[7] * 40)
        await llm.until_handed("small")
        ((_, home),) = llm.handed
        fleet.loads.add(home, 1e6)
        large = await _begin(c, "large", tokens=[8] * 90)
        await llm.until_handed("large")
        answer = await _begin(c, "answer", header=[5], parents=[small, large])
        llm.gates["large"].set()
        await large
        assert "answer" not in dict(llm.handed), "its engine does not know what the other one makes"
        llm.gates["small"].set()
        found = await answer
        assert llm.handed[-2:] == [("small", 1 - home), ("answer", 1 - home)]
        assert found.generated_token_ids

    _run(main())


@pytest.mark.parametrize("fault", ["engine ends", "refused"])
def test_what_becomes_of_a_call_whose_parent_is_not_made(fault: str, model_config: Any) -> None:
    async def main() -> None:
        llm = GatedLLM(2, model_config)
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        llm.gates["document"] = asyncio.Event()
        document = await _begin(c, "document", tokens=[7] * 90)
        answer = await _begin(c, "answer", header=[5], parents=[document])
        await llm.until_handed("document", "answer")
        (home,) = {engine for _, engine in llm.handed}
        if fault == "engine ends":
            llm.engine_core.end(home)
            llm.gates["document"].set()
            assert (await answer).generated_token_ids
            assert c.engine_of(await document) == c.engine_of(await answer) == 1 - home
        else:
            engine = llm.engine_core.clients[home]
            engine.refuses.add("document")
            llm.gates["document"].set()
            with pytest.raises(LimitError):
                await document
            with pytest.raises(ParentFailedError):
                await answer
        assert fleet_of(llm).queued == [0, 0]  # type: ignore[arg-type, union-attr]
        await c.close()

    _run(main())

# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreoClient` on a real server: pending calls, streams, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.test_client import ANNA, GREEDY, SHED
from vllm_choreo import AsyncChoreoClient
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    NameTakenError,
    OffsetError,
    ParentFailedError,
    TooLongError,
    UnknownMessageError,
)
from vllm_choreo.testing.server import Server


def in_session(server: Server, program: Callable[[AsyncChoreoClient], Any], **options: Any) -> None:
    async def main() -> None:
        async with AsyncChoreoClient(server.base_url, server.keys[0], timeout=60.0, **options) as c:
            await program(c)

    asyncio.run(main())


def test_the_methods_as_coroutines(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        doc = await c.prefill(SHED, save_as="doc")
        answers = await c.decode([{"header": "So", "parents": ["doc"]}] * 2, sampling_params=GREEDY)
        assert answers[0].token_ids == answers[1].token_ids
        clean = await c.reencode(answers[0])
        assert await c.provenance(clean) == {answers[0].id}
        with pytest.raises(DeniedMessageError):
            await c.deny(doc).decode("x", parents=[answers[0]])
        await c.pin(doc, ttl=5)
        await c.evict(clean)
        await c.unpin(doc)
        await c.free(*answers)
        assert (await c.message("doc")).token_ids == doc.token_ids == await c.tokenize(SHED)
        assert (await c.stats())["messages"] == 2
        with pytest.raises(NameTakenError):
            await c.prefill("x", save_as="doc")

    in_session(server, program)


@pytest.mark.parametrize("mode", ["choreo", "baseline"])
def test_what_is_still_generated_is_not_freed(server: Server, mode: str) -> None:
    """It would be generated for as long as there are positions, but ends with its session."""
    endless = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True}

    async def program(c: AsyncChoreoClient) -> None:
        draft = await c.submit(header="Once upon a time", sampling_params=endless)
        with pytest.raises(ChoreoError, match="still being generated"):
            await c.free(draft)

    in_session(server, program, mode=mode)


@pytest.mark.parametrize("mode", ["choreo", "baseline"])
def test_calls_on_calls_that_are_not_complete(server: Server, mode: str) -> None:
    long = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}

    async def program(c: AsyncChoreoClient) -> None:
        draft = await c.submit(header="Once upon a time", sampling_params=long)
        named = await c.submit(tokens=ANNA, parents=[draft], save_as="named")
        last = await c.decode("The end", parents=[draft, "named"], sampling_params=GREEDY)
        first, second = await draft, await named
        assert len(first.generated_token_ids) == 100
        assert [span.id for span in last.parents] == [draft.id, named.id]
        assert last.position == first.num_tokens + second.num_tokens
        failed = await c.submit(header="x", parents=[draft], new_offset=2047)
        if mode == "baseline":  # text has no positions that could be too far away
            assert (await failed).num_tokens > 0
            return
        with pytest.raises(ParentFailedError):  # at once if the failure is known by then
            await (await c.submit(header="y", parents=[failed]))
        assert isinstance(await failed.result(), OffsetError)

    in_session(server, program, mode=mode)


def test_a_whole_workflow_in_one_request(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        doc, draft, copy, end = await c.submit_all(
            [
                {"tokens": SHED, "save_as": "doc"},
                {"header": "So", "parents": ["doc"], "save_as": "draft", "sampling_params": GREEDY},
                {"tokens": ANNA, "parents": ["doc"]},
                {"header": "Then", "parents": ["draft", "doc"], "sampling_params": GREEDY},
            ]
        )
        message = await end
        assert [span.id for span in message.parents] == [draft.id, doc.id]
        assert await c.provenance(await copy) == {doc.id}
        with pytest.raises(UnknownMessageError):
            await c.submit_all([{"tokens": SHED, "save_as": "new"}, {"copy_of": "nobody"}])
        assert (await c.prefill("x", save_as="new")).id.endswith("/new")

    in_session(server, program)


def test_pieces_make_up_the_message(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        pieces = [piece async for piece in c.stream_decode(SHED, sampling_params=params)]
        message = pieces[-1].message
        assert message is not None and len(pieces) > 3
        assert all(piece.message is None for piece in pieces[:-1])
        assert "".join(piece.text for piece in pieces) == message.generated_text
        assert sum((piece.token_ids for piece in pieces), ()) == message.generated_token_ids
        again = await c.decode(SHED, sampling_params=params)
        assert again.token_ids == message.token_ids
        with pytest.raises(TooLongError):
            async for _ in c.stream_decode("word " * 3000):
                pass

    in_session(server, program)


LONG = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}


async def until_free(c: AsyncChoreoClient, name: str) -> None:
    """Wait until a name can be used again: the server has ended its call."""
    while True:
        try:
            await c.prefill("x", save_as=name)
            return
        except NameTakenError:
            await asyncio.sleep(0.05)


async def until_begun(server: Server, c: AsyncChoreoClient, name: str) -> None:
    """Wait until the server has a call of that name."""
    with server.client() as client:
        path = f"/v1/choreo/sessions/{c.session}/messages/{name}"
        while (await asyncio.to_thread(client.get, path)).status_code == 404:
            await asyncio.sleep(0.02)


def test_who_leaves_ends_the_call(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        async for _ in c.stream_decode(SHED, save_as="left", sampling_params=LONG):
            break
        await until_free(c, "left")

        call = asyncio.create_task(c.decode(SHED, save_as="cancelled", sampling_params=LONG))
        await until_begun(server, c, "cancelled")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_free(c, "cancelled")
        assert (await c.stats())["messages"] == 2

    in_session(server, program)


def test_closing_ends_all_calls(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        pending = await c.submit(header=SHED, sampling_params=LONG)
        call = asyncio.create_task(c.decode(SHED, save_as="long", sampling_params=LONG))
        await until_begun(server, c, "long")
        await c.close()
        for awaitable in (pending, call):
            with pytest.raises(ChoreoError):
                await awaitable

    in_session(server, program)


def test_twenty_at_once(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        doc = await c.submit(tokens=SHED)
        calls = [
            c.decode(f"{i}.", parents=[doc], sampling_params={"temperature": 0, "max_tokens": 2})
            for i in range(20)
        ]
        made = await asyncio.gather(*calls)
        assert len({message.id for message in made}) == 20
        assert all(message.text.startswith(f"{i}.") for i, message in enumerate(made))

    in_session(server, program)

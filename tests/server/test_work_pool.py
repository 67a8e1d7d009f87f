# SPDX-License-Identifier: Apache-2.0
"""Work that grows with what a tenant sends: by turns, and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from vllm_choreo.errors import ChoreoError
from vllm_choreo.server.work_pool import WorkPool


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def _begun(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


def test_a_tenant_with_much_work_waits_for_itself() -> None:
    async def run() -> None:
        pool, gate, begun = WorkPool(2), threading.Event(), threading.Event()
        order: list[str] = []

        def slow() -> None:
            begun.set()
            assert gate.wait(30)
            order.append("slow")

        many = [asyncio.ensure_future(pool.run("a", slow)) for _ in range(20)]
        await _begun(begun)
        assert await pool.run("b", lambda: 7) == 7, "though 20 of another tenant were there before"
        assert order == []
        gate.set()
        await asyncio.gather(*many)

    _run(run())


def test_tenants_take_turns() -> None:
    async def run() -> None:
        pool, gate, begun = WorkPool(1), threading.Event(), threading.Event()
        order: list[str] = []

        def first() -> None:
            begun.set()
            assert gate.wait(30)

        held = asyncio.ensure_future(pool.run("a", first))
        await _begun(begun)
        tasks = [
            asyncio.ensure_future(pool.run(name[0], order.append, name))
            for name in ("a1", "a2", "a3", "b1", "b2", "c1")
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, *tasks)
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]

    _run(run())


def test_who_gives_up_takes_no_turn_and_leaves_none_taken() -> None:
    async def run() -> None:
        pool, gate, begun = WorkPool(1), threading.Event(), threading.Event()
        order: list[str] = []

        def first() -> None:
            begun.set()
            assert gate.wait(30)
            order.append("first")

        held = asyncio.ensure_future(pool.run("a", first))
        await _begun(begun)
        waiting = asyncio.ensure_future(pool.run("b", order.append, "never"))
        await asyncio.sleep(0)
        waiting.cancel()
        held.cancel()
        await asyncio.gather(held, waiting, return_exceptions=True)
        other = asyncio.ensure_future(pool.run("c", order.append, "other"))
        await asyncio.sleep(0)
        assert order == [], "what runs is not over because nobody waits for it"
        gate.set()
        await other
        # A turn that was given to somebody who has gone passes on.
        gone = asyncio.ensure_future(pool.run("d", order.append, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await pool.run("e", order.append, "last")
        assert order[:2] == ["first", "other"] and order[-1] == "last"

    _run(run())


def test_errors_come_back_and_end_the_turn() -> None:
    async def run() -> None:
        pool = WorkPool(1)

        def wrong() -> None:
            raise ChoreoError("no", parameter="prompt")

        for _ in range(3):
            with pytest.raises(ChoreoError, match="no"):
                await pool.run("a", wrong)
        assert await pool.run("a", lambda: 1) == 1

    _run(run())

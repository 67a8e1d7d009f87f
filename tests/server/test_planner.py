# SPDX-License-Identifier: Apache-2.0
"""Plans on a real server: several sessions are several workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.planner.graphs import planner_without
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.planner import Msg, ainvoke, build, ops
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.workers.server import server_workers
from vllm_choreo.testing.server import Server

# Of the planner's way, so that every call is made as it is written.
_PARTS = ("merge", "warm", "choose", "continue_chats", "cut", "nest", "schedule")
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ROLE = Msg("system", "You answer questions about things and their colours, in a few words. " * 3)


def two_steps() -> CompiledGraph:
    q = ops.placeholder("q")
    answer = ops.llm([ROLE, Msg("user", q)], sampling=GREEDY)
    revised = ops.fmt("Question: {}\n\nAnswer: {}\n\nWrite it as a sentence.", q, answer)
    return build([ops.llm([ROLE, Msg("user", revised)], sampling=GREEDY)]).compile(
        q=["What colour is snow?", "What colour is grass?", "What colour is blood?"]
    )


async def run(server: Server, count: int, **options: Any) -> Any:
    async with _workers(server, count) as workers:
        return await ainvoke(two_steps(), workers, **options)


async def run_as_text(server: Server) -> Any:
    """The batch as it is written: every call, each with its whole text."""
    async with _workers(server, 1, mode="baseline") as workers:
        planner = planner_without(workers, *_PARTS)
        return await planner.ainvoke(two_steps())


def _workers(server: Server, count: int, mode: str = "choreo") -> Any:
    urls = [server.base_url] * count
    return server_workers(urls, api_key=server.keys[0], mode=mode, timeout=60.0)


def test_workers_know_what_the_template_of_their_model_writes(server: Server) -> None:
    async def turns() -> list[object]:
        async with _workers(server, 2) as workers:
            return [worker.turns for worker in workers]

    assert asyncio.run(turns()) == [ChatTurns()] * 2


def test_exact_plans_on_servers(server: Server) -> None:
    text = asyncio.run(run_as_text(server))
    planned = asyncio.run(run(server, 2))
    assert list(planned) == list(text)
    assert {lane.worker for lane in planned.stats.lanes} == {0, 1}
    assert planned.stats.num_shared > 0 and all(lane.answer.exact for lane in planned.stats.lanes)


def one_context() -> CompiledGraph:
    """Two questions about one context, and a second turn of each."""
    context = "Snow is white, grass is green and blood is red, wherever one looks. " * 4
    asked = Msg("user", ops.fmt("{}\n\nQuestion: {}", context, ops.placeholder("q")))
    answer = ops.llm([ROLE, asked], sampling=GREEDY)
    more = [ROLE, asked, Msg("assistant", answer), Msg("user", "Are you sure?")]
    return build({"answer": answer, "again": ops.llm(more, sampling=GREEDY)}).compile(
        q=["What colour is snow?", "Is grass red, or is it not?"]
    )


def test_servers_tell_tokens_so_that_exact_plans_encode_once(server: Server) -> None:
    """The context, and what was asked and answered before."""

    async def results(mode: str, *without: str) -> Any:
        async with _workers(server, 1, mode=mode) as workers:
            return await planner_without(workers, *without).ainvoke(one_context())

    text = asyncio.run(results("baseline", *_PARTS))
    planned = asyncio.run(results("choreo"))
    assert list(planned) == list(text)
    turn = min(lane.answer.num_prompt for lane in planned.stats.lanes)
    assert planned.stats.num_encoded < 2 * turn, "of four prompts, two of them longer"


@pytest.mark.parametrize("count", [1, 2])
def test_choreographed_plans_on_servers(server: Server, count: int) -> None:
    result = asyncio.run(run(server, count, semantics="choreo"))
    assert len(list(result)) == 3 and not result.errors

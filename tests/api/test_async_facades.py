# SPDX-License-Identifier: Apache-2.0
"""The client's asynchronous facade on engines of a few lines; streams, and limits of sessions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.api.fakes import (
    FakeEngine,
    FakeQueue,
    FakeTokenizer,
    Two,
    in_session,
    text_of,
    vllm_config,
    wire_of,
)
from vllm_choreo import AsyncChoreography
from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.api.session import Session
from vllm_choreo.errors import (
    ChoreoError,
    FreedMessageError,
    LimitError,
    ParentFailedError,
    UnsupportedVersionError,
)
from vllm_choreo.semantics.call import CallSpec, linked_specs
from vllm_choreo.semantics.message import Metrics
from vllm_choreo.semantics.session_options import SessionOptions

pytestmark = pytest.mark.usefixtures("operations")


def test_async_methods_agree_with_the_sync_ones() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        doc = await c.prefill("doc")
        answers = await c.decode(
            [{"header": "a", "parents": [doc]}, {"header": "b"}], sampling_params=Two
        )
        assert [answer.text for answer in answers] == ["ade", "bde"]
        assert 0 < answers[0].metrics.ttft < answers[0].metrics.latency
        await c.free(doc)
        assert await c.stats() == {"num_messages": 1}
        with pytest.raises(FreedMessageError):
            await c.decode("a", parents=[doc])
        with pytest.raises(TypeError, match="parent"):
            await c.decode("a", parent=doc)
        with pytest.raises(TypeError, match="sampling_params"):
            await c.prefill("a", sampling_params=Two)
        with pytest.raises(UnsupportedVersionError):
            await c.decode([{"header": "a"}, {"header": "!"}])

    engine = in_session(program)
    assert [operation[0] for operation in engine.operations] == ["free", "stats", "close"]


def test_a_parent_may_still_be_generated() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        draft = await c.submit(header="a", save_as="draft", sampling_params=Two)
        review = await c.submit(header="b", parents=[draft, "draft"], sampling_params=Two)
        assert [text_of(prompt) for prompt in engine.prompts] == ["a", "b"], "both are submitted"
        with pytest.raises(ChoreoError, match="still being generated"):
            await c.free(draft)
        assert (await review).parents[0].id == (await draft).id == draft.id

    in_session(program)


def test_in_baseline_mode_the_client_waits_for_parents() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        stop = SamplingParams(max_tokens=9, stop=["e"])
        draft = await c.submit(header="a", sampling_params=stop)
        child = await c.submit(header="b", parents=[draft], sampling_params=Two)
        last = await c.submit(header="c", parents=[child], sampling_params=Two)
        assert engine.prompts == []
        assert (await last).text == "cde"
        assert (await draft).token_ids == (97, 100, 101)
        assert [text_of(prompt) for prompt in engine.prompts] == ["a", "adeb", "bdec"]

    in_session(program, "baseline")


def test_in_baseline_mode_a_child_of_a_failed_call_fails() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        engine.vanish.add("bad")
        bad = await c.submit(header="bad")
        child = await c.submit(header="b", parents=[bad])
        with pytest.raises(ParentFailedError):
            await child
        with pytest.raises(ChoreoError, match="ended the call"):
            await bad
        with pytest.raises(ParentFailedError):
            await c.decode("c", parents=[child])

    in_session(program, "baseline")


def test_calls_of_one_request_may_name_one_another() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        doc = await c.prefill("doc")
        calls = [
            {"header": "a", "parents": [doc], "save_as": "draft", "sampling_params": Two},
            {"tokens": "b", "parents": ["draft"], "save_as": "note"},
            {"copy_of": doc, "parents": ["note"]},
        ]
        for wrong in ({"header": "c", "tokens": "d"}, {"header": "c", "parents": ["nobody"]}):
            with pytest.raises(ChoreoError):
                await c.submit_all([*calls, wrong])
        assert len(engine.prompts) == 1
        draft, note, copy = [await pending for pending in await c.submit_all(calls)]
        assert [text_of(prompt) for prompt in engine.prompts[1:]] == ["a", "b", "doc"]
        assert wire_of(engine.prompts[2])["parents"] == [[draft.id, None, None]]
        assert wire_of(engine.prompts[3])["copy_of"] == doc.id
        assert copy.provenance == {doc.id, note.id, draft.id} and note.text == "b"

    in_session(program)


def test_a_request_of_the_callers_own_makes_a_message() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        pending = c.begin("ab", sampling_params=Two, save_as="mine")
        child = await c.submit(header="c", parents=["mine"], sampling_params=Two)
        params = pending.call.params.apply(pending.call.sampling_params)
        prompt = {"prompt_token_ids": list(pending.call.token_ids)}
        engine.add_request("own", prompt, params)
        await c.submitted(pending, FakeQueue(engine, "own"))
        engine.advance("own")
        output = engine.advance("own")
        message = await c.conclude(pending, Outcome(output, Metrics(0.0, None, 1.0, 2.0)))
        assert message.text == "abde" and c.message("mine") is message
        assert (await child).parents[0].id == message.id

    in_session(program)


@pytest.mark.parametrize("is_late", [False, True], ids=["", "late"])
def test_a_request_of_the_callers_own_is_aborted_with_its_call(is_late: bool) -> None:
    """Also if the engine has it only after the call was ended."""

    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        stopping = SamplingParams(stop=["e"])
        pending = c.begin("x", sampling_params=stopping)
        engine.add_request("own", {"prompt_token_ids": [120]}, stopping)
        if is_late:
            await c.cancel([pending])
        await c.submitted(pending, FakeQueue(engine, "own"))
        if not is_late:
            await c.cancel([pending])
        assert engine.aborted == ["own"] and not engine.running
        assert engine.operations == [("end", c.session, pending.id, 0, "own")]
        with pytest.raises(ChoreoError, match="ended"):
            await pending

    in_session(program)


@pytest.mark.parametrize(("name", "limit"), [("messages", 2), ("tokens", 8)])
def test_a_session_keeps_to_its_limits(llm: Any, name: str, limit: int) -> None:
    limits = {"max_messages_per_session": 99, "max_tokens_per_session": 99}
    limits[f"max_{name}_per_session"] = limit
    session = Session(
        FakeTokenizer(), vllm_config(), SessionOptions(limits=SimpleNamespace(**limits))
    )
    (a,) = session.plan([CallSpec("prefill", "abc")])
    session.entries.finished(a, ChoreoError("failed"))
    specs = linked_specs([{"tokens": "abcd", "save_as": "a"}, {"tokens": "efgh"}])
    first = session.plan(specs, linked=True)
    with pytest.raises(LimitError, match=name):
        session.plan([CallSpec("prefill", "x")])
    session.entries.freed([first[0].id])
    session.plan([CallSpec("prefill", "x")])


def test_streamed_pieces_make_up_the_message() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        params = SamplingParams(max_tokens=4)
        pieces = [piece async for piece in c.stream_decode("a", sampling_params=params)]
        message = pieces[-1].message
        assert message is not None and [piece.message for piece in pieces[:-1]].count(None) >= 2
        assert "".join(piece.text for piece in pieces) == message.generated_text == "defg"
        assert sum((piece.token_ids for piece in pieces), ()) == message.generated_token_ids
        assert (await c.decode("b", parents=[message], sampling_params=Two)).text == "bde"

    in_session(program)


def test_leaving_a_stream_ends_the_call() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        stream = c.stream_decode("a", save_as="a", sampling_params=SamplingParams(max_tokens=50))
        async for _ in stream:
            break
        await stream.aclose()
        assert engine.aborted == [f"{c.session}/a"]
        with pytest.raises(ParentFailedError):
            await c.decode("b", parents=["a"])

    in_session(program)


def test_a_cancelled_call_is_ended_and_so_is_everything_at_close() -> None:
    async def program(c: AsyncChoreography, engine: FakeEngine) -> None:
        long = SamplingParams(max_tokens=10_000)
        call = asyncio.create_task(c.decode("a", save_as="a", sampling_params=long))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.aborted == [f"{c.session}/a"]
        pending = await c.submit(header="b", save_as="b", sampling_params=long)
        await c.close()
        assert engine.aborted == [f"{c.session}/a", f"{c.session}/b"]
        with pytest.raises(ChoreoError, match="ended"):
            await pending

    in_session(program)

# SPDX-License-Identifier: Apache-2.0
"""Traces and denials, from the client's calls down to the engine's table, without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from tests.api.fakes import FakeAsyncLLM, Two, make_llm, record_operations, wire_of
from tests.engine.scheduler.test_calls import _open, _run
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    OffsetError,
    UnknownMessageError,
    error_from_report,
)
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace, trace_of
from vllm_choreo.store.store import MessageStore


@pytest.fixture
def llm() -> Any:
    return make_llm()


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    record_operations(monkeypatch)


def _names(ids: Any) -> set[str]:
    return {message_id.rpartition("/")[2] for message_id in ids}


def _prisoner(c: Choreography) -> dict[str, Any]:
    """A private plan, and an utterance that was encoded with it."""
    return {
        "secret": c.prefill("s", save_as="secret"),
        "plan": c.decode("p", parents=["secret"], sampling_params=Two, save_as="plan"),
        "utterance": c.prefill("u", parents=["plan"], save_as="utterance"),
    }


# -- the client ----------------------------------------------------------------------------------


def test_provenance_is_all_that_was_read_on_the_way(llm: Any) -> None:
    with Choreography(llm) as c:
        made = _prisoner(c)
        assert made["secret"].provenance == frozenset()
        assert _names(made["utterance"].provenance) == {"secret", "plan"}
        c.free(*made.values())
        assert _names(made["utterance"].provenance) == {"secret", "plan"}


def test_a_trace_is_refused_with_its_path(llm: Any) -> None:
    with Choreography(llm) as c:
        made = _prisoner(c)
        c.free("secret", "plan")
        num_prompts = len(llm.llm_engine.prompts)
        bob = c.deny(made["secret"])
        for call in (
            lambda: c.decode("b", parents=["utterance"], deny=["secret"]),
            lambda: c.decode([{"header": "b", "parents": ["utterance"], "deny": ["secret"]}]),
            lambda: c.prefill([{"tokens": "b", "parents": ["utterance"]}], deny=["secret"]),
            lambda: bob.decode("b", parents=[("utterance", 0, 1)], deny=[]),
            lambda: bob.prefill([{"tokens": "c"}, {"tokens": "b", "parents": ["utterance"]}]),
        ):
            with pytest.raises(DeniedMessageError, match="secret ← plan ← utterance; name a") as e:
                call()
            ids = [made[name].id for name in ("secret", "plan", "utterance")]
            assert (e.value.parameter, e.value.value) == ("parents", ids)
        with pytest.raises(DeniedMessageError, match=": utterance; leave it out"):
            bob.deny("utterance").prefill("b", parents=["utterance"])
        assert len(llm.llm_engine.prompts) == num_prompts, "nothing was submitted"
        assert bob.decode("b", sampling_params=Two).provenance == frozenset()
        assert c.prefill("b", parents=["utterance"]), "the policy is the view's alone"


def test_a_copy_carries_the_text_and_the_new_context_alone(llm: Any) -> None:
    with Choreography(llm) as c:
        made = _prisoner(c)
        public = c.prefill("f")
        bob = c.deny("secret")
        clean = bob.reencode("utterance", parents=[public], save_as="clean")
        wire = wire_of(llm.llm_engine.prompts[-1])
        assert (wire["kind"], wire["copy_of"]) == ("prefill", made["utterance"].id)
        assert (clean.text, clean.token_ids) == ("u", (ord("u"),))
        assert _names(clean.provenance) == {"utterance", _names([public.id]).pop()}
        answer = bob.decode("b", parents=["clean"], sampling_params=Two)
        assert made["secret"].id not in answer.provenance
        # A copy of the secret is the secret, and so is a copy of the copy, or of a part.
        leaked = c.reencode("secret", save_as="leaked")
        again = c.reencode((leaked, 0, 1), save_as="again")
        c.free(leaked)
        for call in (
            lambda: bob.reencode("secret"),
            lambda: bob.reencode(again),
            lambda: bob.prefill("b", parents=[again]),
            lambda: bob.prefill("b", parents=[again], mode="exact"),
        ):
            with pytest.raises(DeniedMessageError, match=r"secret.*leave it out"):
                call()


@pytest.mark.parametrize("mode", ["exact", "baseline"])
def test_text_carries_no_hidden_trace(mode: str) -> None:
    with Choreography(make_llm(), mode=mode) as c:
        made = _prisoner(c)
        # As keys and values, the utterance has read what was listed; as text, nothing.
        read = {"plan"} if mode == "exact" else set()
        assert _names(made["utterance"].provenance) == read
        bob = c.deny("secret", "plan")
        answer = bob.decode("b", parents=["utterance"], sampling_params=Two)
        assert _names(answer.provenance) == ({"utterance"} if mode == "exact" else set())
        with pytest.raises(DeniedMessageError, match=": plan; leave it out"):
            bob.prefill("b", parents=["plan", "utterance"])
        copy = c.reencode("plan", save_as="copy")
        assert _names(copy.provenance) == {"plan"}
        with pytest.raises(DeniedMessageError, match="plan ← copy; leave it out"):
            bob.prefill("b", parents=["copy"])


def test_a_pending_parent_has_its_traces_already() -> None:
    async def run() -> None:
        async with AsyncChoreography(FakeAsyncLLM()) as c:
            secret = await c.submit(header="s", sampling_params=Two, save_as="secret")
            plan = await c.submit(header="p", parents=[secret], sampling_params=Two)
            bob = c.deny(secret)
            with pytest.raises(DeniedMessageError, match="secret ← 0"):
                await bob.submit(tokens="b", parents=[plan])
            with pytest.raises(ChoreoError, match="await it first"):
                await c.reencode(plan)
            exact = await bob.submit(tokens="b", parents=[plan], mode="exact")
            assert (await exact).provenance == {plan.id}
            clean = await bob.reencode(await plan, mode="exact")
            assert clean.provenance == {plan.id}
            assert secret.id in (await plan).provenance

    asyncio.run(run())


def test_what_can_not_be_denied_is_refused(llm: Any) -> None:
    with Choreography(llm) as c, Choreography(llm) as other:
        doc = c.prefill("d")
        with pytest.raises(UnknownMessageError, match="before you deny it"):
            c.deny("no such")
        with pytest.raises(UnknownMessageError):
            other.deny(doc)
        with pytest.raises(ChoreoError, match="list of messages"):
            c.prefill("a", deny=doc)
        with pytest.raises(ChoreoError, match="list of messages"):
            c.prefill([{"tokens": "a", "deny": "0"}])


def test_modes_of_calls(llm: Any) -> None:
    with (
        Choreography(llm) as c,
        Choreography(llm, "exact") as e,
        Choreography(llm, "baseline") as b,
    ):
        c.prefill("a", mode="exact")
        e.prefill([{"tokens": "a"}, {"tokens": "b", "mode": "choreo"}, {"tokens": "c"}])
        c.prefill([{"tokens": "a"}, {"tokens": "b", "mode": "choreo"}], mode="exact")
        sent = ["exact" in wire_of(prompt) for prompt in llm.llm_engine.prompts]
        assert sent == [True, True, False, True, True, False]
        assert b.prefill("a", mode="exact").usage.exact, "a text is exact"
        for mode in ("baseline", "exakt"):
            for session in (c, b):
                with pytest.raises(ChoreoError, match="mode of a call"):
                    session.prefill("a", mode=mode)


def test_in_exact_mode_positions_are_those_of_text(llm: Any) -> None:
    with Choreography(llm, mode="exact") as c:
        doc, other = c.prefill("doc"), c.prefill("other")
        parents = [(doc, 1, 3), other]
        c.prefill("a", parents=parents, offsets=[4, 6], new_offset=11)
        with pytest.raises(OffsetError, match="mode='choreo'"):
            c.prefill("a", parents=parents, offsets=[4, 7])
        with pytest.raises(OffsetError) as caught:
            c.prefill("a", parents=parents, new_offset=8)
        assert caught.value.parameter == "new_offset"
        c.prefill("a", parents=parents, offsets=[4, 7], mode="choreo")


# -- the engine's table --------------------------------------------------------------------------


@pytest.fixture
def table() -> CallTable:
    pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=4)
    return CallTable(MessageStore(pool, 4), max_model_len=48)


def test_the_engine_refuses_whatever_name_a_trace_goes_by(table: CallTable) -> None:
    _run(table, _open(table, "secret", 6))
    _open(table, "plan", 2, parents=["secret"], kind="decode")  # still being generated
    _open(table, "utterance", 3, parents=["plan"])
    _run(table, _open(table, "copy", 6, copy_of="secret"))
    _run(table, _open(table, "copy2", 6, copy_of="copy"))
    for name in ("secret", "copy"):
        table.store.free(table.store.get("s", name))
    # The same recipe as the utterance, and parts of it.
    _open(table, "same", 3, parents=["plan"])
    refused: list[dict[str, Any]] = [
        {"parents": ["utterance"]},
        {"parents": [("utterance", 2, 3)]},
        {"parents": ["same"]},
        {"parents": ["plan"]},
        {"parents": ["copy2"]},
        {"parents": ["copy2"], "exact": True},
        {"copy_of": "copy2"},
    ]
    for number, params in enumerate(refused):
        with pytest.raises(DeniedMessageError, match="secret ← "):
            _open(table, f"bob{number}", 2, deny=["secret"], **params)
    _open(table, "bob", 2, deny=["secret"], parents=["utterance"], exact=True)
    _open(table, "clean", 3, deny=["secret"], copy_of="utterance")
    _open(table, "reader", 2, deny=["secret"], parents=["clean", "bob"])


def _num_shared(table: CallTable, name: str, **params: Any) -> int:
    """Run a prefill of always the same recipe as the scheduler does."""
    call = _open(table, name, 9, **params)
    assert table.resolve(call)
    table.share_duplicate(call)
    _run(table, call)
    return call.num_shared


def test_a_call_shares_no_blocks_of_what_is_denied_to_it(table: CallTable) -> None:
    """What a guess reuses would tell whether it is right."""
    assert _num_shared(table, "secret") == 0
    assert _num_shared(table, "guess", deny=["secret"]) == 0
    assert _num_shared(table, "again", deny=["secret"]) == 8, "with the guess"
    assert _num_shared(table, "free") == 8


def test_the_wire_form_carries_what_is_denied() -> None:
    params = ChoreoParams(exact=True, deny=("s/a", "s/b"), copy_of="s/c")
    wire = params.to_extra_args()["choreo"]
    assert (wire["exact"], wire["deny"], wire["copy_of"]) == (True, ["s/a", "s/b"], "s/c")
    assert ChoreoParams.from_extra_args(json.loads(json.dumps(wire))) == params
    for bad in ({"exact": 1}, {"deny": "s/a"}, {"deny": [None]}, {"deny": [""]}, {"copy_of": 3}):
        with pytest.raises(ChoreoError) as caught:
            ChoreoParams.from_extra_args(bad)
        assert caught.value.parameter in bad


def test_the_error_survives_the_way_to_the_client() -> None:
    with pytest.raises(DeniedMessageError) as caught:
        trace_of("s/b", [Trace("s/u", (Trace("s/p"),))], False).check({"s/p"})
    again = error_from_report(caught.value.to_report())
    assert type(again) is DeniedMessageError and "p ← u" in again.message


# -- laws ----------------------------------------------------------------------------------------

_CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=4), st.booleans(), st.integers(-3, 30)),
    min_size=1,
    max_size=12,
)


def _history(calls: Sequence[tuple[list[int], bool, int]]) -> tuple[list[Trace], list[set[int]]]:
    """Traces of random calls, and what they carry by a definition that keeps sets alone."""
    traces: list[Trace] = []
    carried: list[set[int]] = []  # by keys and values, itself included
    said: list[set[int]] = []  # by its text, itself included
    for number, (drawn, reads_text, drawn_origin) in enumerate(calls):
        parents = [p % number for p in drawn] if number else []
        origin = drawn_origin % number if number and drawn_origin >= 0 else None
        traces.append(
            trace_of(
                str(number),
                [traces[p] for p in parents],
                reads_text,
                None if origin is None else traces[origin],
            )
        )
        said.append({number} | (said[origin] if origin is not None else set()))
        read = [said[p] if reads_text else carried[p] for p in parents]
        carried.append(said[number].union(*read))
    return traces, carried


@given(_CALLS)
def test_the_closure_is_the_union_of_what_was_read(calls: Any) -> None:
    traces, carried = _history(calls)
    for number, (trace, ids) in enumerate(zip(traces, carried, strict=True)):
        assert {int(i) for i in trace.closure()} == ids - {number}
        for other in range(len(traces)):
            assert trace.carries({str(other)}) == (other in ids)
            refused = other in ids and other != number
            try:
                trace.check({str(other)})
            except DeniedMessageError as error:
                assert refused
                path = [int(i) for i in error.value]
                assert path[0] == other and path == sorted(path), "from the oldest to the newest"
            else:
                assert not refused


def test_a_deep_history_is_cheap(llm: Any) -> None:
    """Each message reads all before it: a tree of it would have 2 ** 3000 leaves."""
    traces: list[Trace] = []
    for number in range(3000):
        traces.append(trace_of(str(number), traces[-3:], False))
    assert len(traces[-1].closure()) == 2999
    assert "Trace('2999', 3 parents)" in repr(traces[-1])
    with Choreography(llm) as c:
        assert dataclasses.replace(c.prefill("a"), text="b").text == "b"


def test_whether_a_history_holds_a_message_is_told_without_walking_it() -> None:
    """Each message reads the 60 before it: 120,000 ways back, asked for 2,000 times."""
    traces = [Trace(f"s/b{number}") for number in range(60)]
    for number in range(2000):
        traces.append(trace_of(f"s/c{number}", traces[-60:], False))
    other = Trace("s/other")
    start = time.process_time()
    for _ in range(2000):
        reader = trace_of("s/reader", traces[-1:], False)
        reader.check(["s/other", "s/nobody"])
        assert not reader.carries([other.id])
    assert time.process_time() - start < 20, "walked each time, it is minutes"
    with pytest.raises(DeniedMessageError):
        trace_of("s/reader", traces[-1:], False).check(["s/b0"])


def test_a_long_way_is_told_by_its_ends() -> None:
    """No recursion: a chain is longer than Python's stack, and no error of megabytes."""
    trace = Trace("s/secret")
    for number in range(10_000):
        trace = trace_of(f"s/c{number}", [trace], False)
    with pytest.raises(
        DeniedMessageError, match=r"secret ← … ← c9984 ← .* ← c9999; name a copy"
    ) as e:
        trace_of("s/reader", [trace], False).check(["s/nobody", "s/secret"])
    assert e.value.value[:2] == ["s/secret", "…"] and len(e.value.value) == 18
    assert len(trace.closure()) == 10_000
    assert trace.carries(["s/secret"]) and not trace.carries(["s/reader"])


def test_a_history_in_another_process_is_the_same() -> None:
    first = Trace("s/first")
    trace = pickle.loads(pickle.dumps(trace_of("s/second", [first], False, Trace("s/origin"))))
    assert trace.closure() == {"s/first", "s/origin"}
    assert trace.carries(["s/first"]) and trace.origin.id == "s/origin"

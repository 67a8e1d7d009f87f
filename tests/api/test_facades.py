# SPDX-License-Identifier: Apache-2.0
"""The client's facades on engines of a few lines, which answer what the test tells them to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

from tests.api.fakes import (
    REPORT,
    VOCAB_SIZE,
    FakeAsyncLLM,
    Two,
    make_llm,
    text_of,
    wire_of,
)
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    EmptyTokensError,
    FreedMessageError,
    NameTakenError,
    OffsetError,
    ParentFailedError,
    SpanError,
    TooLongError,
    UnknownMessageError,
    UnsupportedOptionError,
)

pytestmark = pytest.mark.usefixtures("operations")


# -- what reaches the engine, and what comes back ------------------------------------------------


def test_a_prefill_is_one_request_of_which_the_sampled_token_is_dropped(
    c: Choreography, llm: Any
) -> None:
    message = c.prefill("abc")
    (prompt,) = llm.llm_engine.prompts
    assert text_of(prompt) == "abc"
    assert (prompt[1].max_tokens, prompt[1].detokenize) == (1, False)
    assert wire_of(prompt)["kind"] == "prefill"
    assert (message.token_ids, message.text, message.num_tokens) == ((97, 98, 99), "abc", 3)
    assert (message.generated_token_ids, message.finish_reason) == ((), None)


def test_a_decode_makes_header_and_generated_tokens(c: Choreography, llm: Any) -> None:
    doc = c.prefill([97, 98])
    answer = c.decode("xy", parents=[doc], offsets=[4], new_offset=9, sampling_params=Two)
    wire = wire_of(llm.llm_engine.prompts[1])
    assert wire == {
        "parents": [[doc.id, None, None]],
        "offsets": [4],
        "new_offset": 9,
        "save_as": answer.id,
        "kind": "decode",
        "session": c.session,
    }
    assert doc.text == "ab"
    assert answer.token_ids == (120, 121, 100, 101)
    assert (answer.text, answer.generated_text) == ("xyde", "de")
    assert (answer.position, answer.finish_reason) == (7, "length")
    assert answer.usage.repositioned_tokens == 2 and not answer.usage.exact
    assert 0 < answer.metrics.ttft < answer.metrics.latency
    assert Two.extra_args is None, "the caller's sampling parameters are not touched"


def test_a_call_knows_how_long_it_waited_if_the_engine_says_so(c: Choreography, llm: Any) -> None:
    before = time.perf_counter()
    silent = c.decode("x", sampling_params=Two).metrics
    assert before <= silent.submitted <= time.perf_counter() and silent.waiting is None
    scheduled = time.perf_counter() + 30
    llm.llm_engine.metrics = SimpleNamespace(scheduled_ts=scheduled)
    metrics = c.decode("x", sampling_params=Two).metrics
    assert metrics.waiting == pytest.approx(scheduled - metrics.submitted, abs=1e-6)
    llm.llm_engine.metrics = SimpleNamespace(scheduled_ts=0.0)  # the engine refused or lost it
    assert c.decode("x", sampling_params=Two).metrics.waiting is None


def test_ids_belong_to_the_session_and_names_can_be_chosen(c: Choreography) -> None:
    first, second = c.prefill("a"), c.prefill("a", save_as="doc")
    assert len(c.session) == 32
    assert (first.id, second.id) == (f"{c.session}/0", f"{c.session}/doc")
    spans = [
        c.prefill("b", parents=[parent]).parents[0].id for parent in (second, second.id, "doc")
    ]
    assert spans == [second.id] * 3


def test_a_list_runs_in_one_batch_and_keeps_its_order(c: Choreography, llm: Any) -> None:
    doc = c.prefill("doc")
    one = SamplingParams(max_tokens=1)
    items = [
        {"header": "a", "parents": [(doc, 1, 3)], "sampling_params": one},
        {"header": "b", "save_as": "b"},
    ]
    first, second = c.decode(items, sampling_params=Two)
    assert [text_of(prompt) for prompt in llm.llm_engine.prompts] == ["doc", "a", "b"]
    assert (first.num_tokens, second.num_tokens) == (2, 3)
    assert first.parents[0] == (doc.id, 1, 3)
    assert second.id.endswith("/b")
    assert [m.text for m in c.prefill([{"tokens": "x"}, {"tokens": [121]}])] == ["x", "y"]


def test_sampling_defaults_are_the_models(c: Choreography) -> None:
    assert len(c.decode("a").generated_token_ids) == 3


# -- refusals before anything is submitted -------------------------------------------------------

Bad = Callable[[Choreography, Any], object]
BAD_CALLS: dict[str, tuple[Bad, type[ChoreoError], str]] = {
    "empty text": (lambda c, d: c.prefill(""), EmptyTokensError, "tokens"),
    "empty ids": (lambda c, d: c.decode([]), EmptyTokensError, "header"),
    "a number": (lambda c, d: c.prefill(3), ChoreoError, "tokens"),
    "list of texts": (lambda c, d: c.prefill(["a"]), ChoreoError, "tokens"),
    "id too large": (lambda c, d: c.prefill([VOCAB_SIZE]), ChoreoError, "tokens"),
    "bool id": (lambda c, d: c.prefill([True]), ChoreoError, "tokens"),
    "unknown parent": (
        lambda c, d: c.prefill("a", parents=["no"]),
        UnknownMessageError,
        "parents",
    ),
    "foreign parent": (
        lambda c, d: c.prefill("a", parents=[Choreography(make_llm()).prefill("b")]),
        UnknownMessageError,
        "parents",
    ),
    "parents no list": (lambda c, d: c.prefill("a", parents=d), ChoreoError, "parents"),
    "parent no message": (lambda c, d: c.prefill("a", parents=[3]), ChoreoError, "parents"),
    "pair": (lambda c, d: c.prefill("a", parents=[(d, 1)]), ChoreoError, "parents"),
    "span too long": (lambda c, d: c.prefill("a", parents=[(d, 0, 4)]), SpanError, "parents"),
    "span empty": (lambda c, d: c.prefill("a", parents=[(d, 3, None)]), SpanError, "parents"),
    "span float": (lambda c, d: c.prefill("a", parents=[(d, 0.0, 2)]), SpanError, "parents"),
    "offsets short": (
        lambda c, d: c.prefill("a", parents=[d, d], offsets=[0]),
        OffsetError,
        "offsets",
    ),
    "offset negative": (
        lambda c, d: c.prefill("a", parents=[d], offsets=[-1]),
        OffsetError,
        "offsets",
    ),
    "new_offset float": (lambda c, d: c.prefill("a", new_offset=1.5), OffsetError, "new_offset"),
    "name taken": (lambda c, d: c.prefill("a", save_as="doc"), NameTakenError, "save_as"),
    "name twice": (
        lambda c, d: c.prefill([{"tokens": "a", "save_as": "n"}, {"tokens": "b", "save_as": "n"}]),
        NameTakenError,
        "save_as",
    ),
    "name is a number": (lambda c, d: c.prefill("a", save_as="1"), ChoreoError, "save_as"),
    "name with slash": (lambda c, d: c.prefill("a", save_as="a/b"), ChoreoError, "save_as"),
    "itself": (
        lambda c, d: c.prefill("a", save_as="me", parents=["me"]),
        CyclicParentsError,
        "parents",
    ),
    "neighbour": (
        lambda c, d: c.prefill(
            [{"tokens": "a", "save_as": "n"}, {"tokens": "b", "parents": ["n"]}]
        ),
        UnknownMessageError,
        "parents",
    ),
    "too long": (lambda c, d: c.prefill("a" * 300), TooLongError, "parents"),
    "parents too long": (lambda c, d: c.decode("a", parents=[d] * 85), TooLongError, "parents"),
    "more parents than a context has tokens": (
        lambda c, d: c.decode("a", parents=["unknown"] * 100_000),
        TooLongError,
        "parents",
    ),
    "n": (
        lambda c, d: c.decode("a", sampling_params=SamplingParams(n=2)),
        UnsupportedOptionError,
        "n",
    ),
    "prompt_logprob_token_ids": (
        lambda c, d: c.decode("a", sampling_params=SamplingParams(prompt_logprob_token_ids=[5])),
        UnsupportedOptionError,
        "prompt_logprob_token_ids",
    ),
    "beam search": (
        lambda c, d: c.decode("a", sampling_params=BeamSearchParams(beam_width=2, max_tokens=2)),
        UnsupportedOptionError,
        "sampling_params",
    ),
    "a dict of options": (
        lambda c, d: c.decode("a", sampling_params={"max_tokens": 2}),
        UnsupportedOptionError,
        "sampling_params",
    ),
    "own choreo": (
        lambda c, d: c.decode("a", sampling_params=SamplingParams(extra_args={"choreo": {}})),
        UnsupportedOptionError,
        "extra_args",
    ),
    "sampling a prefill": (
        lambda c, d: c.prefill([{"tokens": "a", "sampling_params": Two}]),
        UnsupportedOptionError,
        "sampling_params",
    ),
    "unknown key": (lambda c, d: c.decode([{"header": "a", "parent": d}]), ChoreoError, "parent"),
    "both names": (
        lambda c, d: c.decode([{"header": "a", "tokens": "a"}]),
        ChoreoError,
        "tokens",
    ),
    "shared parents": (
        lambda c, d: c.decode([{"header": "a"}], parents=[d]),
        ChoreoError,
        "parents",
    ),
    "mixed list": (lambda c, d: c.decode([{"header": "a"}, "b"]), ChoreoError, "tokens"),
    "free twice": (lambda c, d: (c.free(d), c.free(d)), FreedMessageError, "messages"),
    "freed parent": (
        lambda c, d: (c.free(d), c.prefill("a", parents=[d])),
        FreedMessageError,
        "parents",
    ),
    "freed name": (
        lambda c, d: (c.free(d), c.prefill("a", save_as="doc")),
        NameTakenError,
        "save_as",
    ),
    "closed": (lambda c, d: (c.close(), c.prefill("a")), FreedMessageError, "session"),
}


@pytest.mark.parametrize("mode", ["choreo", "baseline"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_before_it_is_submitted(name: str, mode: str) -> None:
    bad, error, parameter = BAD_CALLS[name]
    llm = make_llm()
    c = Choreography(llm, mode=mode)
    doc = c.prefill("doc", save_as="doc")
    llm.llm_engine.prompts.clear()
    with pytest.raises(error) as caught:
        bad(c, doc)
    assert type(caught.value) is error
    assert caught.value.parameter == parameter
    assert len(caught.value.message) > 15, "says what to do"
    assert llm.llm_engine.prompts == []


def test_one_bad_item_refuses_the_whole_list_and_takes_no_name(c: Choreography, llm: Any) -> None:
    with pytest.raises(OffsetError):
        c.prefill([{"tokens": "a", "save_as": "a"}, {"tokens": "b", "new_offset": -1}])
    assert llm.llm_engine.prompts == []
    assert c.prefill("a", save_as="a").id.endswith("/a")
    assert c.prefill("b").id.endswith("/0")


def test_an_unknown_mode_is_refused(llm: Any) -> None:
    with pytest.raises(ChoreoError, match="mode"):
        Choreography(llm, mode="fast")


# -- adapters ------------------------------------------------------------------------------------

ONE, TWO = LoRARequest("one", 1, "folder/one"), LoRARequest("two", 2, "folder/two")


def test_an_adapter_goes_with_its_calls(llm: Any) -> None:
    llm.llm_engine.vllm_config.lora_config = object()
    with Choreography(llm, adapter=ONE) as c:
        doc = c.prefill("doc")
        c.decode("a", parents=[doc], adapter=TWO)
        c.reencode(doc, adapter="model")
        c.decode([{"header": "a", "adapter": "folder/model"}, {"header": "b"}], adapter=TWO)
    assert llm.llm_engine.adapters == [ONE, TWO, None, None, TWO]

    async def program() -> None:
        llm = FakeAsyncLLM()
        llm.vllm_config.lora_config = object()
        async with AsyncChoreography(llm, adapter=ONE) as c:
            await c.prefill("doc")
            await (await c.submit(header="a", adapter=TWO))
        assert llm.llm_engine.adapters == [ONE, TWO]

    asyncio.run(program())


def test_the_baseline_passes_adapters_on(llm: Any) -> None:
    llm.llm_engine.vllm_config.lora_config = object()
    with Choreography(llm, "baseline", adapter=ONE) as c:
        c.decode([{"header": "a"}, {"header": "b", "adapter": TWO}])
    assert llm.llm_engine.adapters == [ONE, TWO]


@pytest.mark.parametrize(
    ("adapter", "error", "advice"),
    [
        (ONE, UnsupportedOptionError, "enable_lora=True"),
        ("one", ChoreoError, "LoRARequest.*model"),
        (1, ChoreoError, "LoRARequest"),
    ],
)
def test_what_is_no_adapter_is_refused(
    llm: Any, adapter: Any, error: type[ChoreoError], advice: str
) -> None:
    with pytest.raises(error, match=advice) as caught:
        Choreography(llm, adapter=adapter)
    assert caught.value.parameter == "adapter"
    with pytest.raises(error, match=advice):
        Choreography(llm).decode("a", adapter=adapter)
    assert llm.llm_engine.prompts == []


# -- refusals by the engine ----------------------------------------------------------------------


def test_an_error_of_the_engine_is_raised_as_what_it_is(c: Choreography, llm: Any) -> None:
    llm.llm_engine.refuse["bad"] = REPORT
    with pytest.raises(TooLongError) as caught:
        c.decode("bad", save_as="bad")
    assert (caught.value.parameter, caught.value.message) == ("parents", "too long")
    with pytest.raises(ParentFailedError):
        c.decode("a", parents=["bad"])
    del llm.llm_engine.refuse["bad"]
    assert c.decode("bad", save_as="bad").id.endswith("/bad"), "the name of a failed call is free"


def test_of_a_list_with_a_failed_call_the_others_live_on(c: Choreography, llm: Any) -> None:
    llm.llm_engine.refuse["bad"] = REPORT
    with pytest.raises(TooLongError) as caught:
        c.decode([{"header": "a"}, {"header": "bad"}, {"header": "b"}], sampling_params=Two)
    first, error, last = caught.value.results
    assert error is caught.value
    assert (first.text, last.text) == ("ade", "bde")
    assert c.decode("c", parents=[first, last], sampling_params=Two).num_tokens == 3


def test_an_engine_without_choreography_is_noticed(c: Choreography, llm: Any) -> None:
    llm.llm_engine.is_choreo = False
    with pytest.raises(ChoreoError, match="does not choreograph"):
        c.prefill("a")


def test_an_interrupted_call_leaves_nothing_in_the_engine(
    c: Choreography, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.llm_engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        c.decode("a", save_as="a")
    assert llm.llm_engine.aborted == [f"{c.session}/a"]
    assert not llm.llm_engine.has_unfinished_requests()


def test_requests_of_others_are_not_swallowed(c: Choreography, llm: Any) -> None:
    llm.llm_engine.running["theirs"] = None
    with pytest.raises(ChoreoError, match="wait_for_completion"):
        c.prefill("a")


# -- the end of messages -------------------------------------------------------------------------


def test_free_evict_stats_and_close_reach_the_engine(llm: Any) -> None:
    with Choreography(llm) as c:
        first, second = c.prefill("a"), c.prefill("b")
        c.evict(first)
        c.free(first, second.id)
        assert c.stats() == {"num_messages": 1}
    c.close()
    assert llm.llm_engine.operations == [
        ("evict", c.session, [first.id]),
        ("free", c.session, [first.id, second.id]),
        ("stats", c.session),
        ("close", c.session),
    ]


def test_with_stop_strings_the_engine_is_told_where_the_message_ends(
    c: Choreography, llm: Any
) -> None:
    doc = c.prefill("doc")
    stop = SamplingParams(max_tokens=9, stop=["e"])
    stopped, plain = c.decode(
        [
            {"header": "a", "parents": [doc], "new_offset": 5, "sampling_params": stop},
            {"header": "b", "sampling_params": Two},
        ]
    )
    _, with_stop, without = llm.llm_engine.prompts
    assert wire_of(with_stop)["open_end"] and "open_end" not in wire_of(without)
    assert llm.llm_engine.operations == [("end", c.session, stopped.id, 3)]
    assert stopped.token_ids == (97, 100, 101) and stopped.finish_reason == "stop"
    assert (stopped.position, stopped.usage.encoded_tokens) == (5, 3)
    assert plain.text == "bde"


# -- baseline ------------------------------------------------------------------------------------


def test_the_baseline_concatenates_parents_and_header(llm: Any) -> None:
    with Choreography(llm, mode="baseline") as c:
        a = c.prefill("abcd")
        b = c.prefill("ef", parents=[a], offsets=[90], new_offset=7)
        answer = c.decode("gh", parents=[a, (b, 1, 2), (a, None, 2)], sampling_params=Two)
        assert c.stats() == {"messages": 3, "tokens": 10}
        c.evict(a)
        c.free(a)
    (prompt,) = llm.llm_engine.prompts
    assert text_of(prompt) == "abcdfabgh"
    assert prompt[1].extra_args is None
    assert (b.position, answer.position) == (4, 7)
    assert answer.text == "ghde"
    assert (answer.usage.reused_tokens, answer.usage.encoded_tokens) == (8, 3)
    assert answer.usage.exact
    assert llm.llm_engine.operations == []


def test_the_baseline_leaves_stop_strings_to_vllm(llm: Any) -> None:
    c = Choreography(llm, mode="baseline")
    answer = c.decode("a", sampling_params=SamplingParams(max_tokens=9, stop=["e"]))
    assert len(llm.llm_engine.prompts) == 1
    assert (answer.token_ids, answer.finish_reason) == ((97, 100, 101), "stop")

# SPDX-License-Identifier: Apache-2.0
"""The client's facades on engines of a few lines, which answer what the test tells them to.

The fake engine generates the token ids 100, 101, … and records every prompt that it is given.
"""

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

import vllm_choreo.engine.utility as utility
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.api.session import Session
from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    EmptyTokensError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    OffsetError,
    ParentFailedError,
    SpanError,
    TooLongError,
    UnknownMessageError,
    UnsupportedOptionError,
    UnsupportedVersionError,
)
from vllm_choreo.semantics.call import CallSpec, linked_specs
from vllm_choreo.semantics.message import Metrics
from vllm_choreo.semantics.session_options import SessionOptions

VOCAB_SIZE, MAX_MODEL_LEN = 512, 256
Two = SamplingParams(max_tokens=2)


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids)


class FakeEngine:
    """Answers each request in as many steps as it has tokens; `refuse[header]` is an error."""

    def __init__(self) -> None:
        self.prompts: list[tuple[list[int], SamplingParams]] = []
        self.operations: list[tuple[Any, ...]] = []
        self.aborted: list[str] = []
        self.refuse: dict[str, dict[str, str]] = {}
        self.vanish: set[str] = set()  # headers of requests that the engine ends
        self.running: dict[str, Any] = {}
        self.is_choreo = True
        self.metrics: Any = None  # vLLM's, if it logs statistics
        self.vllm_config = vllm_config()
        self.adapters: list[Any] = []  # of the prompts

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, lora_request: Any = None
    ) -> None:
        self.prompts.append((prompt["prompt_token_ids"], params))
        self.adapters.append(lora_request)
        self.running[request_id] = (prompt["prompt_token_ids"], params, 0)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> list[Any]:
        return [self.advance(request_id) for request_id in list(self.running)]

    def advance(self, request_id: str) -> Any:
        prompt, params, num_done = self.running[request_id]
        num_done += 1
        self.running[request_id] = (prompt, params, num_done)
        error = self.refuse.get(FakeTokenizer().decode(prompt))
        vanished = FakeTokenizer().decode(prompt) in self.vanish
        token_ids = [] if error else [100 + i for i in range(num_done)]
        # A stop string is found in the second token, by the front end: there is no report.
        stopped = bool(params.stop) and num_done == 2
        finished = bool(error) or vanished or stopped or num_done == params.max_tokens
        transfer = {"choreo_error": error} if error else None
        if finished:
            del self.running[request_id]
            if not error and not stopped and self.is_choreo and params.extra_args:
                transfer = {"choreo": self.report(prompt, params, num_done)}
        reason = (
            ("error" if error or vanished else "stop" if stopped else "length")
            if finished
            else None
        )
        completion = SimpleNamespace(
            token_ids=token_ids,
            text="".join(chr(token) for token in token_ids),
            logprobs=None,
            finish_reason=reason if finished else None,
        )
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=prompt,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=len(prompt) // 4 * 4,
            prompt_logprobs=None,
            kv_transfer_params=transfer,
            metrics=self.metrics,
        )

    def report(self, prompt: list[int], params: SamplingParams, num_done: int) -> dict[str, Any]:
        assert params.extra_args is not None
        wire = params.extra_args["choreo"]
        num_generated = num_done if wire["kind"] == "decode" else 0
        return {
            "id": wire["save_as"],
            "num_tokens": len(prompt) + num_generated,
            "position": 7,
            "exact": False,
            "reused_tokens": 3,
            "repositioned_tokens": 2,
            "encoded_tokens": len(prompt) + num_generated,
        }


# Of a message that the client ended after its third token.
REPORT_OF_END = {
    "position": 5,
    "exact": False,
    "reused_tokens": 3,
    "repositioned_tokens": 0,
    "encoded_tokens": 3,
}


def vllm_config() -> Any:
    model_config = SimpleNamespace(
        model="folder/model",
        served_model_name="model",
        max_model_len=MAX_MODEL_LEN,
        get_vocab_size=lambda: VOCAB_SIZE,
        get_diff_sampling_param=lambda: {"max_tokens": 3},
    )
    return SimpleNamespace(model_config=model_config, lora_config=None)


def make_llm() -> Any:
    return SimpleNamespace(llm_engine=FakeEngine(), get_tokenizer=FakeTokenizer)


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine operations are recorded by the fake engine."""

    def call(llm: Any, *operation: Any) -> Any:
        llm.llm_engine.operations.append(operation)
        return REPORT_OF_END if operation[0] == "end" else {"num_messages": 1}

    async def call_async(llm: Any, *operation: Any) -> Any:
        return call(llm, *operation)

    monkeypatch.setattr(utility, "call", call)
    monkeypatch.setattr(utility, "call_async", call_async)


@pytest.fixture
def llm() -> Any:
    return make_llm()


@pytest.fixture
def c(llm: Any) -> Choreography:
    return Choreography(llm)


def text_of(prompt: tuple[list[int], SamplingParams]) -> str:
    return FakeTokenizer().decode(prompt[0])


def wire_of(prompt: tuple[list[int], SamplingParams]) -> dict[str, Any]:
    assert prompt[1].extra_args is not None
    wire: dict[str, Any] = prompt[1].extra_args["choreo"]
    return wire


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

REPORT = {"type": "TooLongError", "parameter": "parents", "value": "[]", "message": "too long"}


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


# -- async ---------------------------------------------------------------------------------------


class FakeQueue:
    """The outputs of one request, one per turn of the event loop."""

    def __init__(self, engine: FakeEngine, request_id: str) -> None:
        self.engine, self.request_id = engine, request_id

    def get_nowait(self) -> None:
        return None

    async def get(self) -> Any:
        await asyncio.sleep(0)
        return self.engine.advance(self.request_id)

    def close(self) -> None:
        pass


class FakeAsyncLLM:
    def __init__(self) -> None:
        self.llm_engine = FakeEngine()
        self.vllm_config = self.llm_engine.vllm_config
        self.get_tokenizer = FakeTokenizer
        self.engine_core = None  # one engine

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        lora_request: Any = None,
        data_parallel_rank: int | None = None,
    ) -> FakeQueue:
        assert data_parallel_rank is None
        await asyncio.sleep(0)
        if prompt["prompt_token_ids"] == [ord("!")]:
            raise UnsupportedVersionError("no")
        self.llm_engine.add_request(request_id, prompt, params, lora_request)
        return FakeQueue(self.llm_engine, request_id)

    async def abort(self, request_id: str, internal: bool) -> None:
        assert internal
        self.llm_engine.abort_request([request_id])


def in_session(
    program: Callable[[AsyncChoreography, FakeEngine], Any], mode: str = "choreo"
) -> FakeEngine:
    llm = FakeAsyncLLM()

    async def run() -> None:
        async with AsyncChoreography(llm, mode=mode) as c:
            await program(c, llm.llm_engine)
            await asyncio.sleep(0)
            assert not llm.llm_engine.running, "nothing is left running"

    asyncio.run(run())
    return llm.llm_engine


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

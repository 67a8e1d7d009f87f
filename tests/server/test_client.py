# SPDX-License-Identifier: Apache-2.0
"""`ChoreoClient` and `AsyncChoreoClient` on a real server: they do what `Choreography` does."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

import vllm_choreo.client
from tests.engine.test_workflows import WORKFLOWS
from tests.server.serving import Server
from vllm_choreo import AsyncChoreoClient, ChoreoClient, Choreography
from vllm_choreo.client import Logprob
from vllm_choreo.client.sampling import SENT
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    OffsetError,
    ParentFailedError,
    TooLongError,
    UnknownMessageError,
    UnknownSessionError,
    UnsupportedOptionError,
)
from vllm_choreo.message import Message
from vllm_choreo.page.build import Shown, ShownProblem, page_html
from vllm_choreo.workflows.transcript import Transcript

GREEDY = {"temperature": 0, "max_tokens": 6}
SHED = "The shed behind the house is green, and its door is red.\n"
ANNA = "Anna owns a bicycle, a boat and two dogs.\n"


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., ChoreoClient]]:
    """`connect(mode=...)`: a client of the first tenant, closed after the test."""
    clients: list[ChoreoClient] = []

    def open_client(**options: Any) -> ChoreoClient:
        options = {"api_key": server.keys[0], "timeout": 60.0, **options}
        clients.append(ChoreoClient(server.base_url, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def c(connect: Callable[..., ChoreoClient]) -> ChoreoClient:
    return connect()


def completion(server: Server, text: str, **options: Any) -> dict[str, Any]:
    """What an ordinary request on `text` answers."""
    body = {"model": server.model, "prompt": text, "return_token_ids": True, **GREEDY, **options}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


# -- each method ---------------------------------------------------------------------------------


def test_messages_and_what_is_told_of_them(c: ChoreoClient) -> None:
    before = time.perf_counter()
    doc = c.prefill(SHED, save_as="doc")
    other = c.prefill(ANNA)
    answer = c.decode(
        "The door is",
        parents=[other, (doc, 2, None)],
        offsets=[0, 40],
        new_offset=100,
        sampling_params=SamplingParams(**GREEDY),
        save_as="answer",
    )
    assert (doc.id, doc.text, doc.position) == (f"{c.session}/doc", SHED, 0)
    assert doc.num_tokens == len(doc.token_ids) == doc.usage.encoded_tokens > 10
    assert doc.usage.exact and doc.finish_reason is None and not doc.generated_token_ids
    assert answer.text == "The door is" + answer.generated_text
    assert len(answer.generated_token_ids) == 6 and answer.finish_reason == "length"
    assert answer.position == 100 and not answer.usage.exact
    assert [tuple(span) for span in answer.parents] == [
        (other.id, None, None),
        (doc.id, 2, None),
    ]
    assert answer.usage.reused_tokens == other.num_tokens + doc.num_tokens - 2
    assert answer.usage.repositioned_tokens == doc.num_tokens - 2
    assert answer.usage.encoded_tokens == answer.num_tokens
    assert answer.provenance == {doc.id, other.id}
    times = answer.metrics
    assert before < times.submitted < times.submitted + times.latency < time.perf_counter()
    assert 0 < times.ttft < times.latency

    again = c.message("answer")
    assert (again.id, again.token_ids, again.text) == (answer.id, answer.token_ids, answer.text)
    assert (again.parents, again.usage) == (answer.parents, answer.usage)
    assert again.provenance == answer.provenance


@pytest.mark.parametrize("mode", ["choreo", "exact"])
def test_a_chain_is_an_ordinary_request(
    server: Server, connect: Callable[..., ChoreoClient], mode: str
) -> None:
    c = connect(mode=mode)
    first = c.prefill(SHED)
    second = c.prefill(ANNA, parents=[first] if mode == "choreo" else [])
    answer = c.decode("So the dogs", parents=[first, second], sampling_params=GREEDY)
    expected = completion(server, SHED + ANNA + "So the dogs")
    assert answer.generated_text == expected["text"]
    assert answer.generated_token_ids == tuple(expected["token_ids"])
    assert answer.usage.exact


def test_baseline_is_text_over_the_prefix_cache(
    server: Server, connect: Callable[..., ChoreoClient]
) -> None:
    c = connect(mode="baseline")
    doc, other = c.prefill([{"tokens": SHED * 4}, {"tokens": ANNA}])
    assert doc.usage.encoded_tokens == 0 and doc.metrics.latency == 0.0
    calls = [{"header": "So the dogs", "parents": [doc, other], "sampling_params": GREEDY}] * 2
    c.decode(calls[:1])
    first, second = c.decode(calls)
    expected = completion(server, SHED * 4 + ANNA + "So the dogs")
    assert first.generated_text == second.generated_text == expected["text"]
    assert first.usage.exact and first.usage.reused_tokens > 0
    assert first.provenance == frozenset()


def test_a_list_runs_in_parallel(c: ChoreoClient) -> None:
    doc = c.prefill(SHED)
    calls: list[Any] = [
        {"header": f"Sentence {i}:", "parents": [doc], "save_as": f"s{i}"} for i in range(4)
    ]
    calls[1]["sampling_params"] = {"temperature": 0, "max_tokens": 2}
    start = time.perf_counter()
    made = c.decode(calls, sampling_params=GREEDY)
    took = time.perf_counter() - start
    assert [message.id for message in made] == [f"{c.session}/s{i}" for i in range(4)]
    assert [len(message.generated_token_ids) for message in made] == [6, 2, 6, 6]
    assert sum(message.metrics.latency for message in made) > 1.5 * took


def test_logprobs_have_vllms_shape(server: Server, c: ChoreoClient) -> None:
    answer = c.decode(SHED, sampling_params=SamplingParams(logprobs=2, **GREEDY))
    expected = completion(server, SHED, logprobs=2)["logprobs"]
    assert len(answer.logprobs) == 6
    for entry, token, logprob in zip(
        answer.logprobs, answer.generated_token_ids, expected["token_logprobs"], strict=True
    ):
        assert all(isinstance(found, Logprob) for found in entry.values()) and len(entry) >= 2
        assert entry[token].rank == 1
        assert entry[token].logprob == pytest.approx(logprob, abs=1e-3)
    texts = [
        entry[token].decoded_token
        for entry, token in zip(answer.logprobs, answer.generated_token_ids, strict=True)
    ]
    assert "".join(texts) == answer.generated_text


def test_sampling_options_reach_the_engine(c: ChoreoClient) -> None:
    plain = c.decode(SHED, sampling_params=GREEDY)
    word = plain.generated_text.split()[1]
    stopped = c.decode(SHED, sampling_params=SamplingParams(stop=[word], **GREEDY))
    assert plain.generated_text.startswith(stopped.generated_text)
    assert word not in stopped.generated_text and stopped.finish_reason == "stop"
    assert c.prefill("x", parents=[stopped]).usage.reused_tokens == stopped.num_tokens

    token = plain.generated_token_ids[0]
    biased = SamplingParams(logit_bias={token: -100.0}, **GREEDY)
    assert c.decode(SHED, sampling_params=biased).generated_token_ids[0] != token
    seeded = {"temperature": 1.0, "seed": 7, "max_tokens": 6}
    first, second = c.decode([{"header": SHED}, {"header": SHED}], sampling_params=seeded)
    assert first.token_ids == second.token_ids
    unlimited = SamplingParams(temperature=0, max_tokens=None, stop_token_ids=[token])
    assert c.decode(SHED, sampling_params=unlimited).finish_reason == "stop"
    assert len(c.decode(SHED).generated_token_ids) > 0  # the engine's own parameters


def test_free_evict_pin_and_their_numbers(c: ChoreoClient) -> None:
    docs = [c.prefill(SHED, save_as=".."), c.prefill(ANNA)]
    stats = c.stats()
    assert (stats["id"], stats["mode"], stats["messages"]) == (c.session, "choreo", 2)
    assert stats["tokens"] == sum(doc.num_tokens for doc in docs)
    assert stats["expires_at"] > stats["created"]

    read = {"parents": docs, "sampling_params": GREEDY}
    before = c.decode("So", **read)
    c.evict(*docs)
    after = c.decode("So", **read)
    assert after.token_ids == before.token_ids
    assert after.usage.encoded_tokens >= before.usage.encoded_tokens

    c.pin(docs[0], ttl=30)
    assert c.stats()["pinned_messages"] == 1
    c.pin(*docs)
    assert c.stats()["pinned_messages"] == 2
    c.unpin(docs[0], docs[1].id)
    assert c.stats()["pinned_messages"] == 0
    with pytest.raises(LimitError):
        c.pin(docs[0], ttl=1e9)

    c.free(docs[0], before)  # a message that is named ".." is no step in a path
    assert c.stats()["messages"] == 2
    with pytest.raises(FreedMessageError):
        c.decode("So", **read)


def test_what_a_message_carries_and_who_may_not_read_it(c: ChoreoClient) -> None:
    secret = c.prefill("The password is swordfish.\n", save_as="secret")
    plan = c.decode("My plan:", parents=[secret], sampling_params=GREEDY)
    said = c.decode("I say:", parents=[plan], sampling_params=GREEDY)
    assert said.provenance == {secret.id, plan.id}

    public = c.deny(secret)
    with pytest.raises(DeniedMessageError, match="secret ← ") as refused:
        public.decode("Go on:", parents=[said])
    assert secret.id in refused.value.value
    with pytest.raises(DeniedMessageError):
        c.prefill("x", parents=[said], deny=["secret"])
    clean = public.reencode(said)
    assert clean.token_ids == said.token_ids and clean.provenance == {said.id}
    assert public.decode("Go on:", parents=[clean], sampling_params=GREEDY).usage
    assert c.decode("Go on:", parents=[said], sampling_params=GREEDY).provenance > {secret.id}
    with pytest.raises(UnknownMessageError):
        c.deny("nobody").prefill("x")


def test_sessions_are_apart_and_end(server: Server, connect: Callable[..., ChoreoClient]) -> None:
    with connect() as first, connect() as second:
        doc = first.prefill(SHED, save_as="doc")
        with pytest.raises(UnknownMessageError):
            second.prefill("x", parents=[doc])
        with pytest.raises(UnknownMessageError):
            second.free(doc)
        with server.client() as client:
            assert client.delete(f"/v1/choreo/sessions/{second.session}").status_code == 200
        with pytest.raises(UnknownSessionError):
            second.prefill("x")
        with pytest.raises(UnknownSessionError):
            second.stats()
        assert first.prefill("x", parents=[doc])
    path = f"/v1/choreo/sessions/{first.session}"
    with server.client() as client:
        assert client.get(path).status_code == 404
    with pytest.raises(FreedMessageError):
        first.prefill("x")


def test_a_session_that_nobody_uses_is_closed(connect: Callable[..., ChoreoClient]) -> None:
    c = connect(ttl_seconds=0.2)
    time.sleep(0.3)
    with pytest.raises(UnknownSessionError):
        c.prefill("x")


def test_keys(server: Server) -> None:
    for key in ("wrong", None):
        with pytest.raises(ChoreoError, match="API key") as refused:
            ChoreoClient(server.base_url, key)
        assert server.base_url in str(refused.value)
    with pytest.raises(ChoreoError, match="does not choreograph"):
        ChoreoClient(f"{server.base_url}/elsewhere", server.keys[0])


def test_the_example_of_the_documentation(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    doc = vllm_choreo.client.__doc__ or ""
    program = re.search(r"^    from vllm_choreo import.*?\n\n(?=\S)", doc, re.DOTALL | re.MULTILINE)
    assert program is not None
    text = re.sub(r"^    ", "", program[0], flags=re.MULTILINE)
    text = text.replace("http://127.0.0.1:8000", server.base_url).replace("secret", server.keys[0])
    exec(compile(text, "vllm_choreo.client", "exec"), {})
    assert "Usage(exact=" in capsys.readouterr().out


# -- workflows -----------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 4}
CASES = [(name, "choreo") for name in WORKFLOWS if "serial" not in name]
CASES += [("tree_of_thoughts", "exact"), ("parallel_debate", "baseline")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_workflows_run_unchanged(
    connect: Callable[..., ChoreoClient], name: str, mode: str
) -> None:
    c = connect(mode=mode)
    params: Any = SAMPLED if mode == "choreo" else SamplingParams(**SAMPLED)
    log = WORKFLOWS[name](c, params)
    seen: set[str] = set()
    for step in log.steps:
        assert {span.id for span in step.message.parents} <= seen
        assert mode != "choreo" or step.message.provenance <= seen
        seen.add(step.message.id)
    assert log.answers and log.decodes() and log.mode == mode
    data = log.to_json()
    assert Transcript.from_json(data).to_json()["steps"] == data["steps"]
    page = page_html(log.workflow, [ShownProblem(name, "?", (), [Shown(data)])], {})
    assert log.steps[-1].message.id in page


# -- errors --------------------------------------------------------------------------------------


class _NoEngine:
    """An LLM of which only tokenizer and limits are asked, as in baseline mode."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)
        self.model_config = SimpleNamespace(
            max_model_len=2048,
            get_vocab_size=lambda: 49_152,
            get_diff_sampling_param=dict,
        )

    def get_tokenizer(self) -> Any:
        return self._tokenizer


BAD: dict[str, Callable[[Any], Any]] = {
    "empty text": lambda c: c.prefill(""),
    "empty list": lambda c: c.decode([]),
    "nothing": lambda c: c.prefill(None),
    "a number": lambda c: c.decode(7),
    "bytes": lambda c: c.prefill(b"text"),
    "token beyond the vocabulary": lambda c: c.prefill([10**6]),
    "negative token": lambda c: c.prefill([-1]),
    "bool for a token": lambda c: c.prefill([True]),
    "unknown parent": lambda c: c.prefill("x", parents=["nobody"]),
    "foreign parent": lambda c: c.prefill("x", parents=["other/doc"]),
    "odd parent": lambda c: c.prefill("x", parents=["ä b/c\n"]),
    "freed parent": lambda c: c.prefill("x", parents=["gone"]),
    "parents no list": lambda c: c.prefill("x", parents="doc"),
    "parent no message": lambda c: c.prefill("x", parents=[3]),
    "parent of two entries": lambda c: c.prefill("x", parents=[("doc", 0)]),
    "span too long": lambda c: c.prefill("x", parents=[("doc", 0, 1000)]),
    "span behind the end": lambda c: c.prefill("x", parents=[("doc", 1000, None)]),
    "empty span": lambda c: c.prefill("x", parents=[("doc", 3, 3)]),
    "negative span": lambda c: c.prefill("x", parents=[("doc", -1, None)]),
    "bool in a span": lambda c: c.prefill("x", parents=[("doc", True, None)]),
    "too many offsets": lambda c: c.prefill("x", parents=["doc"], offsets=[0, 1]),
    "float offset": lambda c: c.prefill("x", parents=["doc"], offsets=[0.0]),
    "negative new offset": lambda c: c.prefill("x", new_offset=-1),
    "offsets no list": lambda c: c.prefill("x", parents=["doc"], offsets="0"),
    "name taken": lambda c: c.prefill("x", save_as="doc"),
    "name of a freed message": lambda c: c.prefill("x", save_as="gone"),
    "name twice": lambda c: c.prefill([{"tokens": "x", "save_as": "a"}] * 2),
    "name with a slash": lambda c: c.prefill("x", save_as="a/b"),
    "name that is a number": lambda c: c.prefill("x", save_as="12"),
    "name that is no text": lambda c: c.prefill("x", save_as=3),
    "empty name": lambda c: c.prefill("x", save_as=""),
    "its own parent": lambda c: c.prefill("x", save_as="me", parents=["me"]),
    "no such mode": lambda c: c.prefill("x", mode="fast"),
    "mode of a session": lambda c: c.prefill("x", mode="baseline"),
    "unknown denied": lambda c: c.prefill("x", deny=["nobody"]),
    "denied": lambda c: c.prefill("x", parents=["doc"], deny=["doc"]),
    "deny no list": lambda c: c.prefill("x", deny="doc"),
    "too many tokens": lambda c: c.prefill("word " * 3000),
    "far too much text": lambda c: c.prefill("word " * 100_000),
    "too long with parents": lambda c: c.prefill("x", parents=["doc"] * 300),
    "n": lambda c: c.decode("x", sampling_params=SamplingParams(n=2)),
    "prompt logprobs": lambda c: c.decode("x", sampling_params=SamplingParams(prompt_logprobs=1)),
    "sampling of a prefill": lambda c: c.prefill([{"tokens": "x", "sampling_params": GREEDY}]),
    "sampling no parameters": lambda c: c.decode("x", sampling_params=3),
    "the engine's own arguments": lambda c: c.decode(
        "x", sampling_params=SamplingParams(extra_args={"choreo": {}})
    ),
    "item of a list no dict": lambda c: c.prefill([{"tokens": "x"}, "y"]),
    "item without tokens": lambda c: c.prefill([{"parents": ["doc"]}]),
    "item with both": lambda c: c.prefill([{"tokens": "x", "header": "y"}]),
    "unknown key": lambda c: c.prefill([{"tokens": "x", "parent": "doc"}]),
    "parents beside a list": lambda c: c.prefill([{"tokens": "x"}], parents=["doc"]),
    "second of a list": lambda c: c.prefill([{"tokens": "x"}, {"tokens": ""}]),
    "copy of nobody": lambda c: c.reencode("nobody"),
    "copy of a freed message": lambda c: c.reencode("gone"),
    "copy of too much": lambda c: c.reencode(("doc", 0, 1000)),
    "free nobody": lambda c: c.free("nobody"),
    "free a freed message": lambda c: c.free("gone"),
    "free no message": lambda c: c.free(3),
    "evict nobody": lambda c: c.evict("nobody"),
    "pin nobody": lambda c: c.pin("nobody", ttl=5),
    "pin for no time": lambda c: c.pin("doc", ttl=0),
    "pin for ever": lambda c: c.pin("doc", ttl=float("inf")),
    "pin for True": lambda c: c.pin("doc", ttl=True),
    "unpin a freed message": lambda c: c.unpin("gone"),
}
# Where the server, which sees JSON, has a name of its own for what is wrong.
_OF_JSON = ("content", "name", "sampling_params.", "ttl")


@pytest.fixture(scope="module")
def local(embedded_model_path: Path) -> Choreography:
    """The same rules without a server or an engine."""
    return _with_messages(Choreography(_NoEngine(embedded_model_path), mode="baseline"))


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[ChoreoClient]:
    with ChoreoClient(server.base_url, server.keys[0]) as c:
        yield _with_messages(c)


def _with_messages(c: Any) -> Any:
    c.prefill(SHED, save_as="doc")
    c.free(c.prefill(ANNA, save_as="gone"))
    return c


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_as_without_a_server(
    name: str, local: Choreography, remote: ChoreoClient
) -> None:
    with pytest.raises(ChoreoError) as expected:
        BAD[name](local)
    with pytest.raises(ChoreoError) as refused:
        BAD[name](remote)
    assert type(refused.value) is type(expected.value)
    if not refused.value.parameter.startswith(_OF_JSON):
        assert refused.value.parameter == expected.value.parameter
    assert remote.stats()["messages"] == 1


def test_a_call_that_fails_in_the_engine_leaves_the_others(c: ChoreoClient) -> None:
    far = {"header": "x", "new_offset": 2047, "sampling_params": GREEDY}
    with pytest.raises(OffsetError) as failed:
        c.decode([{"header": "So", "sampling_params": GREEDY, "save_as": "good"}, far])
    good, bad = failed.value.results
    assert isinstance(good, Message) and bad is failed.value
    assert c.decode("x", parents=["good"], sampling_params=GREEDY).usage.reused_tokens > 0


def test_all_sampling_options_of_the_server_can_be_sent() -> None:
    from vllm_choreo.server.schemas import SamplingBody

    assert set(SamplingBody.model_fields) == SENT | {"prompt_logprobs"}


# -- the asynchronous client ---------------------------------------------------------------------


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
        assert clean.provenance == {answers[0].id}
        with pytest.raises(DeniedMessageError):
            await c.deny(doc).decode("x", parents=[answers[0]])
        await c.pin(doc, ttl=5)
        await c.evict(clean)
        await c.unpin(doc)
        await c.free(*answers)
        assert (await c.message("doc")).token_ids == doc.token_ids
        assert (await c.stats())["messages"] == 2
        with pytest.raises(NameTakenError):
            await c.prefill("x", save_as="doc")

    in_session(server, program)


@pytest.mark.parametrize("mode", ["choreo", "baseline"])
def test_calls_on_calls_that_are_not_complete(server: Server, mode: str) -> None:
    long = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}

    async def program(c: AsyncChoreoClient) -> None:
        draft = await c.submit(header="Once upon a time", sampling_params=long)
        with pytest.raises(ChoreoError, match="still being generated"):
            await c.free(draft)
        named = await c.submit(tokens=ANNA, parents=[draft], save_as="named")
        last = await c.decode("The end", parents=[draft, "named"], sampling_params=GREEDY)
        first, second = await draft, await named
        assert len(first.generated_token_ids) == 40
        assert [span.id for span in last.parents] == [draft.id, named.id]
        assert last.position == first.num_tokens + second.num_tokens
        failed = await c.submit(header="x", parents=[draft], new_offset=2047)
        child = await c.submit(header="y", parents=[failed])
        if mode == "choreo":  # text has no positions that could be too far away
            assert isinstance(await failed.result(), OffsetError)
            with pytest.raises(ParentFailedError):
                await child

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
        assert (await copy).provenance == {doc.id}
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
    for _ in range(100):
        try:
            await c.prefill("x", save_as=name)
            return
        except NameTakenError:
            await asyncio.sleep(0.05)
    raise AssertionError("the call goes on")


def test_who_leaves_ends_the_call(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        async for _ in c.stream_decode(SHED, save_as="left", sampling_params=LONG):
            break
        await until_free(c, "left")

        call = asyncio.create_task(c.decode(SHED, save_as="cancelled", sampling_params=LONG))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_free(c, "cancelled")
        assert (await c.stats())["messages"] == 2

    in_session(server, program)


def test_closing_ends_all_calls(server: Server) -> None:
    async def program(c: AsyncChoreoClient) -> None:
        pending = await c.submit(header=SHED, sampling_params=LONG)
        call = asyncio.create_task(c.decode(SHED, sampling_params=LONG))
        await asyncio.sleep(0.3)
        start = time.perf_counter()
        await c.close()
        for awaitable in (pending, call):
            with pytest.raises(ChoreoError):
                await awaitable
        assert time.perf_counter() - start < 5.0

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


def test_an_unsupported_option_is_named(c: ChoreoClient) -> None:
    with pytest.raises(UnsupportedOptionError, match="detokenize"):
        c.decode("x", sampling_params=SamplingParams(detokenize=False))
    with pytest.raises(ChoreoError, match="max_token"):
        c.decode("x", sampling_params={"max_token": 3})

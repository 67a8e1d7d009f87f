# SPDX-License-Identifier: Apache-2.0
"""`ChoreoClient` and `AsyncChoreoClient` on a real server: they do what `Choreography` does."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import SamplingParams

import vllm_choreo.client
from tests.grids import sampled
from tests.lab.workflows.test_workflows_in_engine import WORKFLOWS
from vllm_choreo import ChoreoClient
from vllm_choreo.client import Logprob
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    FreedMessageError,
    LimitError,
    UnknownMessageError,
    UnknownSessionError,
)
from vllm_choreo.testing.server import Server
from vllm_choreo.transcript.page import Shown, ShownProblem, page_html
from vllm_choreo.transcript.transcript import Transcript

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
    assert c.tokenize(SHED) == doc.token_ids
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
    assert c.provenance(answer) == {doc.id, other.id}
    times = answer.metrics
    assert before < times.submitted < times.submitted + times.latency < time.perf_counter()
    assert 0 < times.ttft < times.latency

    again = c.message("answer")
    assert (again.id, again.token_ids, again.text) == (answer.id, answer.token_ids, answer.text)
    assert (again.parents, again.usage) == (answer.parents, answer.usage)
    assert c.provenance("answer") == c.provenance(again)
    with pytest.raises(ChoreoError, match=r"ask for it by c\.provenance"):
        _ = again.provenance


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
    assert c.provenance(first) == frozenset()


def num_steps(server: Server) -> float:
    """Steps of the engine since it started."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = "vllm:iteration_tokens_total_count"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_list_runs_in_parallel(server: Server, c: ChoreoClient) -> None:
    doc = c.prefill(SHED)
    calls: list[Any] = [
        {"header": f"Sentence {i}:", "parents": [doc], "save_as": f"s{i}"} for i in range(4)
    ]
    calls[1]["sampling_params"] = {"temperature": 0, "max_tokens": 2}
    before = num_steps(server)
    made = c.decode(calls, sampling_params=GREEDY)
    assert [message.id for message in made] == [f"{c.session}/s{i}" for i in range(4)]
    assert [len(message.generated_token_ids) for message in made] == [6, 2, 6, 6]
    assert 0 < num_steps(server) - before < 6 + 2 + 6 + 6  # the last may not be counted yet


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
    assert c.provenance(said) == {secret.id, plan.id}

    public = c.deny(secret)
    with pytest.raises(DeniedMessageError, match="secret ← ") as refused:
        public.decode("Go on:", parents=[said])
    assert secret.id in refused.value.value
    with pytest.raises(DeniedMessageError):
        c.prefill("x", parents=[said], deny=["secret"])
    clean = public.reencode(said)
    assert clean.token_ids == said.token_ids and c.provenance(clean) == {said.id}
    assert public.decode("Go on:", parents=[clean], sampling_params=GREEDY).usage
    again = c.decode("Go on:", parents=[said], sampling_params=GREEDY)
    assert c.provenance(again) > {secret.id}
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
# Every sixth of them, and the other modes, in every run.
CASES = [("tree_of_thoughts", "exact"), ("parallel_debate", "baseline")]
CASES += sorted(
    ((name, "choreo") for name in WORKFLOWS if "serial" not in name),
    key=lambda case: [*WORKFLOWS].index(case[0]) % 6,
)


@pytest.mark.parametrize("case", sampled(CASES, 7), ids="-".join)
def test_workflows_run_unchanged(
    connect: Callable[..., ChoreoClient], case: tuple[str, str]
) -> None:
    name, mode = case
    c = connect(mode=mode)
    params: Any = SAMPLED if mode == "choreo" else SamplingParams(**SAMPLED)
    log = WORKFLOWS[name](c, params)
    seen: set[str] = set()
    for step in log.steps:
        assert {span.id for span in step.message.parents} <= seen
        assert mode != "choreo" or c.provenance(step.message) <= seen
        seen.add(step.message.id)
    assert log.answers and log.decodes() and log.mode == mode
    data = log.to_json()
    assert Transcript.from_json(data).to_json()["steps"] == data["steps"]
    page = page_html(log.workflow, [ShownProblem(name, "?", (), [Shown(data)])], {})
    assert log.steps[-1].message.id in page

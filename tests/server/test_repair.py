# SPDX-License-Identifier: Apache-2.0
"""Repair over HTTP: by our own routes, by the OpenAI client, by ours, as a session's rule."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.server.openai_calls import Caller
from tests.server.serving import Session
from vllm_choreo.client import ChoreoClient
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import Cell, PairProfile
from vllm_choreo.repair.policy import Policy
from vllm_choreo.testing.server import Server
from vllm_choreo.trained_adapter import ModelIdentity

DOCUMENTS = ("Anna owns a red bicycle. It is in the shed.", "Bert has the key. He is at work.")
GREEDY = {"temperature": 0, "max_tokens": 4}


def _documents(session: Session) -> list[str]:
    for number, text in enumerate(DOCUMENTS):
        session.call(type="prefill", content=text, save_as=f"doc{number}")
    return ["doc0", "doc1"]


@pytest.mark.parametrize(
    ("repair", "repaired"),
    [("first:5", 5), ([[], [[0, 2], [4, 7]]], 5), ({"share": 0.0, "by": "random"}, 0)],
)
def test_calls_repair(session: Session, repair: Any, repaired: int) -> None:
    named = _documents(session)
    call = {"type": "decode", "content": "So", "parents": named, "sampling_params": GREEDY}
    assert session.call(**call, repair=repair)["usage"]["repaired_tokens"] == repaired
    assert session.call(**call)["usage"]["repaired_tokens"] == 0


def test_a_parent_is_freed_while_its_reader_waits_for_another(
    server: Server, session: Session
) -> None:
    """The reader gets what it named, and nothing of that is left when it has it."""
    named = _documents(session)
    writer = {"type": "decode", "content": "So", "save_as": "writer",
              "sampling_params": {**GREEDY, "max_tokens": 300, "ignore_eos": True}}  # fmt: skip
    reader = {"type": "decode", "content": "So", "parents": [*named, "writer"], "repair": "first:5",
              "save_as": "reader", "sampling_params": GREEDY}  # fmt: skip

    async def run() -> tuple[dict[str, Any], bool]:
        headers = {"Authorization": f"Bearer {server.keys[0]}"}
        path = f"{session.path}/messages"
        async with httpx.AsyncClient(
            base_url=server.base_url, headers=headers, timeout=120
        ) as client:
            written = asyncio.create_task(client.post(path, json=writer))
            while (await client.get(f"{path}/writer")).status_code == 404:
                await asyncio.sleep(0.01)
            read = asyncio.create_task(client.post(path, json=reader))
            while (await client.get(f"{path}/reader")).status_code == 404:
                await asyncio.sleep(0.01)
            freed = await client.post(f"{path}/free", json={"messages": named})
            was_waiting = not written.done()
            assert freed.status_code == (await written).status_code == 200
            answer = await read
            assert answer.status_code == 200, answer.text
            return answer.json(), was_waiting

    found, was_waiting = asyncio.run(run())
    assert was_waiting
    assert found["usage"]["repaired_tokens"] > 0
    assert session.client.delete(f"{session.path}/messages/writer").status_code == 200
    left = session.usage()
    assert left["messages"] == 1 and left["resident_tokens"] <= found["num_tokens"]


def test_a_session_has_a_rule(alpha: httpx.Client) -> None:
    session = Session(alpha, repair="first:5")
    assert alpha.get(session.path).json()["repair"] == "first:5"
    call = {"type": "prefill", "content": "So", "parents": _documents(session)}
    assert session.call(**call)["usage"]["repaired_tokens"] == 5
    assert session.call(**call, repair="none")["usage"]["repaired_tokens"] == 0
    alpha.delete(session.path)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_an_openai_client_repairs(server: Server, session: Session, route: str) -> None:
    caller, named = Caller(server, session.id), _documents(session)
    for repair in ("first:5", "[[], [[0, 2], [4, 7]]]"):
        answer = caller(route, "So", parents=named, repair=repair)
        assert answer["usage"]["repaired_tokens"] == 5


def test_our_client_repairs(server: Server) -> None:
    with ChoreoClient(server.base_url, server.keys[0], repair="first:5") as c:
        docs = [c.prefill(text) for text in DOCUMENTS]
        assert c.decode("So", parents=docs, sampling_params=GREEDY).usage.repaired_tokens == 5
        plain = c.decode("So", parents=docs, repair="none", sampling_params=GREEDY)
        assert plain.usage.repaired_tokens == 0
        with pytest.raises(RepairError, match="behind the"):
            c.prefill("So", parents=docs, repair=[[], [(0, 999)]])


def test_layers_are_repaired(server: Server, session: Session) -> None:
    """By a call, by the OpenAI client, by a session of ours, which keeps what it needs."""
    for number, text in enumerate(DOCUMENTS):
        session.call(type="prefill", content=text, save_as=f"doc{number}", keep_hidden=[1])
    call = {"type": "decode", "content": "So", "parents": ["doc0", "doc1"]}
    usage = session.call(**call, repair={"layers": [1, 2]}, sampling_params=GREEDY)["usage"]
    assert usage["repaired_tokens"] > 5 and not usage["exact"]
    caller = Caller(server, session.id)
    answer = caller("completions", "So", parents=["doc0", "doc1"], layers=[1, 2], keep_hidden=[1])
    assert answer["usage"]["repaired_tokens"] == usage["repaired_tokens"]
    with ChoreoClient(server.base_url, server.keys[0], repair={"layers": [1, 2]}) as c:
        docs = [c.prefill(text) for text in DOCUMENTS]
        found = c.decode("So", parents=docs, sampling_params=GREEDY)
        assert found.usage.repaired_tokens == usage["repaired_tokens"]
        with pytest.raises(RepairError, match="2 layers"):
            c.decode("So", parents=docs, layers=(1, 3), sampling_params=GREEDY)


def test_a_client_brings_its_policy(server: Server, alpha: httpx.Client, tmp_path: Path) -> None:
    """A file is the client's: of the server's files it can name none."""
    masks = {"answer": {"document": (0,)}}
    policy = Policy("document_qa", ModelIdentity("served", "", ""), 4, 2, masks, 0.5)
    policy.save(tmp_path / "policy.json")
    with ChoreoClient(server.base_url, server.keys[0], repair=tmp_path / "policy.json") as c:
        docs = [c.prefill(text, role="document") for text in DOCUMENTS]
        answer = c.decode("So", parents=docs, role="answer", sampling_params=GREEDY)
        assert answer.usage.repaired_tokens == 4 and answer.role == "answer"
        with pytest.raises(RepairError, match="calibrated on document_qa"):
            c.decode("So", parents=docs, role="vote", sampling_params=GREEDY)
    named = {"repair": str(tmp_path / "policy.json")}
    assert alpha.post("/v1/choreo/sessions", json=named).status_code == 400
    foreign = replace(policy, model=ModelIdentity("other", "ab", "cd")).to_json()
    refused = alpha.post("/v1/choreo/sessions", json={"repair": foreign})
    assert refused.status_code == 400 and "calibrated with other" in refused.text


def test_a_client_brings_the_profile_of_a_pair(
    server: Server, alpha: httpx.Client, tmp_path: Path
) -> None:
    """The server chooses by its load and counts why; it opens no file for a client."""
    cells = (Cell((), 1.0, 0.1, 9.0, 0.1), Cell(((0, 1),), 0.2, 0.02, 9.0, 60.0))
    base = ModelIdentity("served", "", "")
    PairProfile(base, None, None, 2, 1.0, cells, "", ((0, 1),)).save(tmp_path / "pair.json")
    asked = {"max_quality_loss": 1.0, "ttft": 30.0}
    counted = [f'vllm_choreo:pair_{what}_total{{model_name="' for what in ("calls", "layers")]
    before = [_counted(alpha, name) for name in counted]
    for rule, layers in (
        (tmp_path / "pair.json", 1),
        ({"pair": tmp_path / "pair.json", **asked}, 0),  # a minute is too long
    ):
        with ChoreoClient(server.base_url, server.keys[0], repair=rule) as c:
            docs = [c.prefill(text) for text in DOCUMENTS]
            by_profile = c.decode("So", parents=docs, sampling_params=GREEDY)
            ranges = (0, 1) if layers else ()
            by_hand = c.decode("So", parents=docs, layers=ranges, sampling_params=GREEDY)
            assert by_profile.generated_token_ids == by_hand.generated_token_ids
            assert by_profile.usage.repaired_tokens == by_hand.usage.repaired_tokens
            assert bool(by_hand.usage.repaired_tokens) == bool(layers)
    after = [_counted(alpha, name) for name in counted]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1]
    named = {"repair": {"pair": str(tmp_path / "pair.json")}}
    refused = alpha.post("/v1/choreo/sessions", json=named)
    assert refused.status_code == 400 and "opens no file" in refused.text


def _counted(client: httpx.Client, name: str) -> float:
    """The sum of a metric over all its labels."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("repair", ["best:3", 7, [[[0, 3]]], {"share": 3, "by": "random"}])
def test_bad_repairs_are_refused(session: Session, repair: Any) -> None:
    call = {"type": "prefill", "content": "So", "parents": _documents(session)}
    answer = session.post({**call, "repair": repair})
    assert answer.status_code in (400, 422)
    assert "repair" in answer.json()["error"]["param"]
    assert session.call(**call, repair="first:5")["usage"]["repaired_tokens"] == 5


def test_repaired_tokens_are_counted(server: Server, session: Session) -> None:
    def counted() -> float:
        page = httpx.get(f"{server.base_url}/metrics").text
        (line,) = [
            line for line in page.splitlines() if line.startswith("vllm_choreo:repaired_tokens_tot")
        ]
        return float(line.split()[-1])

    before = counted()
    session.call(type="prefill", content="So", parents=_documents(session), repair="first:5")
    assert counted() - before == 5

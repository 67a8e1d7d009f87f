# SPDX-License-Identifier: Apache-2.0
"""Two servers of two models that differ in their weights alone, over one folder of messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.engine.variants import make_variant
from tests.quick import NUM_LAYERS
from tests.server.serving import QUICK
from vllm_choreo import ChoreoClient
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import FreedMessageError, KeptError, UnknownKeptError, UnknownMessageError
from vllm_choreo.repair.pair import Cell, PairProfile
from vllm_choreo.testing.server import KEYS, MODEL_NAME, start_server
from vllm_choreo.trained_adapter import ModelIdentity

pytestmark = pytest.mark.exhaustive  # servers of its own

TEXTS = {
    "shed": "The shed behind the house is green, and nobody has painted it for many years.",
    "anna": "Anna owns a red bicycle, and she has lent it to a friend until the end of May.",
}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


class Clients(NamedTuple):
    """Of one tenant on the servers of writer and reader, and of another one on the latter."""

    writer: ChoreoClient
    reader: ChoreoClient
    stranger: ChoreoClient
    writer_url: str
    reader_url: str


@pytest.fixture(scope="module")
def clients(
    shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("variants")
    variant = make_variant(shallow_model_path, folder)
    models = ModelIdentity.of(variant), ModelIdentity.of(shallow_model_path)
    cells = (Cell((), 1.0, 0.1, 9.0, 0.1), Cell(((1, NUM_LAYERS),), 0.1, 0.01, 9.0, 0.2))
    pairs = folder / "pairs"
    pairs.mkdir()
    for reader, writer in (models, models[::-1]):  # each reads what the other one has written
        PairProfile(
            reader, writer.weights, None, NUM_LAYERS, 9.0, cells, "", ((1, NUM_LAYERS),)
        ).save(pairs / f"{reader.name}.json")
    options: dict[str, Any] = {
        "choreo_keep": str(folder / "kept"),
        "choreo_pair": str(pairs),
        "settings": {"hidden_memory_gib": 0.1, "server": {"pair_content": True}},
        **QUICK,
    }
    with (
        start_server(shallow_model_path, folder, **options) as one,
        start_server(variant, folder, **options) as other,
        ChoreoClient(one.base_url, KEYS[0]) as writer,
        ChoreoClient(other.base_url, KEYS[0]) as reader,
        ChoreoClient(other.base_url, KEYS[1]) as stranger,
    ):
        yield Clients(writer, reader, stranger, one.base_url, other.base_url)


def test_what_one_server_has_saved_the_other_one_reads(clients: Clients) -> None:
    writer, reader, stranger = clients[:3]
    for name, text in TEXTS.items():
        writer.prefill(text, save_as=name, keep_hidden=[1])
    writer.save([*TEXTS], "shared", encodings=True)
    with pytest.raises(KeptError, match="another model"):
        reader.load("shared")
    with pytest.raises(UnknownKeptError):
        stranger.load("shared", on_mismatch="variant")
    loaded = reader.load("shared", on_mismatch="variant")
    assert [message.id.rpartition("/")[2] for message in loaded] == [*TEXTS]

    def read(**options: Any) -> Any:
        return reader.decode("So", parents=[*TEXTS], sampling_params=GREEDY, **options)

    plain, some, own = (read(layers=ends) for ends in ((), (1, NUM_LAYERS), (0, NUM_LAYERS)))
    assert plain.usage.encoded_tokens == plain.num_tokens
    num_tokens = sum(message.num_tokens for message in loaded)
    assert some.usage.repaired_tokens == own.usage.repaired_tokens == num_tokens
    assert own.usage.exact and not plain.usage.exact and not some.usage.exact
    made = [reader.prefill(text) for text in TEXTS.values()]
    text = reader.decode("So", parents=made, mode="exact", sampling_params=GREEDY)
    assert own.generated_token_ids == text.generated_token_ids
    assert plain.generated_token_ids != text.generated_token_ids


def test_what_one_client_names_the_other_one_reads(clients: Clients) -> None:
    """No program saves or loads: both servers have the profiles of their models."""
    writer, reader, stranger, _, url = clients
    said = {"a:b": TEXTS["shed"], "anna.2": TEXTS["anna"]}
    for name, text in said.items():
        writer.prefill(text, save_as=name)

    def read(client: ChoreoClient, **options: Any) -> Any:
        return client.decode("So", parents=[*said], sampling_params=GREEDY, **options)

    with pytest.raises(UnknownMessageError):
        read(stranger)
    by_pair, by_hand = read(reader), read(reader, layers=(1, NUM_LAYERS))
    assert by_pair.generated_token_ids == by_hand.generated_token_ids
    assert by_pair.usage.repaired_tokens == by_hand.usage.repaired_tokens > 0
    assert not by_pair.usage.exact
    in_words = read(reader, layers="auto")
    assert in_words.generated_token_ids == by_pair.generated_token_ids
    assert in_words.usage.repaired_tokens == by_pair.usage.repaired_tokens
    assert read(reader, layers="reuse").usage.repaired_tokens == 0
    assert writer.decode("So", parents=[*said], sampling_params=GREEDY).usage.repaired_tokens == 0
    reader.free("anna.2")
    with pytest.raises(FreedMessageError):
        read(reader)
    assert reader.decode("So", parents=[reader.prefill("Own.")]).usage.repaired_tokens == 0
    with ChoreoClient(url, KEYS[0]) as another:
        chat = another.decode("So", parents=["a:b"], sampling_params=GREEDY)
        assert chat.usage.repaired_tokens > 0


def test_what_one_model_generates_the_other_one_reads_and_answers(clients: Clients) -> None:
    """A writes, B reads and writes, A reads that: no text goes from one client to the other."""
    writer, reader, stranger = clients[:3]
    writer.prefill(TEXTS["shed"], save_as="topic")
    plan = writer.decode("So", parents=["topic"], save_as="plan", sampling_params=GREEDY)
    with pytest.raises(UnknownMessageError):
        stranger.decode("Then", parents=["plan"], sampling_params=GREEDY)
    reply = reader.decode("Then", parents=["plan"], save_as="reply", sampling_params=GREEDY)
    assert reply.usage.repaired_tokens == plan.num_tokens
    by_pair = writer.decode("Thus", parents=["reply"], sampling_params=GREEDY)
    by_hand = writer.decode(
        "Thus", parents=["reply"], layers=(1, NUM_LAYERS), sampling_params=GREEDY
    )
    assert by_pair.usage.repaired_tokens == reply.num_tokens
    assert by_pair.generated_token_ids == by_hand.generated_token_ids
    own = writer.decode("Thus", parents=["topic", "plan"], sampling_params=GREEDY)
    assert own.usage.exact and own.usage.repaired_tokens == 0, "its own are read as they are"


def test_answers_of_openai_requests_are_exchanged_too(clients: Clients) -> None:
    writer, url = clients.writer, clients.reader_url
    with httpx.Client(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60) as client:
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "What is green?"}],
            "max_tokens": 4,
            "vllm_xargs": {"choreo_parents": [], "choreo_save_as": "chat"},
        }
        answer = client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        body["stream"] = True
        body["vllm_xargs"]["choreo_save_as"] = "stream"
        answer = client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text
    read = writer.decode("So", parents=["chat", "stream"], sampling_params=GREEDY)
    assert read.usage.repaired_tokens > 8 and not read.usage.exact


def test_parts_of_chats_are_found_by_what_they_hold(clients: Clients) -> None:
    """No chat names anything: a document comes again, with other words around it."""
    *_, one, other = clients
    document = {"role": "user", "content": " ".join(TEXTS.values()) * 3}
    after = [{"role": "assistant", "content": "I have read it."}]
    after += [{"role": "user", "content": "What is green?"}]
    ask(one, KEYS[0], [document, *after])
    while sum(saved["name"].startswith("part-") for saved in kept(one)) < 4:
        time.sleep(0.05)  # two of the parts, the one before them, and the answer
    told = {"role": "system", "content": "You sell bicycles, and nothing else."}
    chat = [told, document, {"role": "user", "content": "Who owns one?"}]
    strange = ask(other, KEYS[1], chat)
    assert strange["choreo"]["auto"]["found_tokens"] == strange["usage"]["repaired_tokens"] == 0
    found = ask(other, KEYS[0], chat)
    assert found["choreo"]["auto"]["found"] == 1
    num_tokens = found["choreo"]["auto"]["found_tokens"]
    assert num_tokens > 100
    assert found["usage"]["repaired_tokens"] >= num_tokens, "it is read by the profile"
    again = ask(other, KEYS[0], chat)
    assert again["choreo"]["auto"]["new_tokens"] == 0
    texts = [one["choices"][0]["message"]["content"] for one in (found, again)]
    assert texts[0] == texts[1]
    exact = ask(other, KEYS[0], chat, "exact")
    assert exact["usage"]["repaired_tokens"] == 0 and exact["usage"]["exact"]


def ask(url: str, key: str, messages: list[dict[str, str]], mode: str = "choreo") -> dict[str, Any]:
    """Answer to a chat that names no messages."""
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}", "X-Choreo-Auto": mode}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_workflow_whose_roles_are_played_by_both(clients: Clients, tmp_path: Path) -> None:
    """A debate in which one side is the other server's model, from the command line."""
    *_, one, other = clients
    arguments = ["--server", one, "--api-key", KEYS[0], "--role", f"round={one},{other}"]
    small = ["--rounds", "1", "--limit", "1", "--max-tokens", "8"]
    before = {saved["name"] for saved in kept(one)}
    out = str(tmp_path / "out")
    assert cli.main(["run", "iterative_debate", *arguments, *small, "--out", out]) == 0
    assert {saved["name"] for saved in kept(one)} == before, "nothing is left of the run"
    transcript = json.loads((tmp_path / "out" / "transcript.json").read_text())
    steps = {(step["stage"], step["author"]): step for step in transcript["steps"]}
    ids = [step["id"] for step in steps.values()]
    assert all(parent[0] in ids for step in steps.values() for parent in step["parents"])
    answer, negative = steps["answer", "moderator"], steps["round 1", "negative"]
    num_tokens = {step["id"]: step["num_tokens"] for step in steps.values()}
    read = sum(num_tokens[parent[0]] for parent in negative["parents"])
    assert negative["usage"]["repaired_tokens"] == read, "the other model has written all of it"
    assert answer["usage"]["repaired_tokens"] > 0
    assert steps["round 1", "affirmative"]["usage"]["repaired_tokens"] == 0
    assert "roles" in (tmp_path / "out" / "index.html").read_text()


def kept(url: str) -> list[dict[str, Any]]:
    """What the tenant has saved."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    answer = httpx.get(f"{url}/v1/choreo/kept", headers=headers, timeout=300)
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def test_openai_requests_find_them_too(clients: Clients) -> None:
    writer, url = clients.writer, clients.reader_url
    writer.prefill(TEXTS["anna"], save_as="for_openai")
    with httpx.Client(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60) as client:
        body = {
            "model": MODEL_NAME,
            "prompt": "So",
            "max_tokens": 4,
            "vllm_xargs": {"choreo_parents": ["for_openai"], "choreo_layers": "auto"},
        }
        answer = client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

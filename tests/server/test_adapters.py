# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters over HTTP: `model` names the one that encodes a call, as it does without us."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.adapters import Adapter
from tests.engine.oracle import Oracle, assert_choices, random_tokens, whole
from tests.server.serving import Session
from vllm_choreo import ChoreoClient
from vllm_choreo.errors import AdapterError
from vllm_choreo.testing.server import MODEL_NAME, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own

WRITER = "writer"  # the same adapter, trained for the calls that encode messages


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapter"), 1)


@pytest.fixture(scope="module")
def client(
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    adapter: Adapter,
) -> Iterator[httpx.Client]:
    with (
        start_server(
            tiny_model_path("llama"),
            tmp_path_factory.mktemp("server"),
            enable_lora=True,
            max_loras=1,
            lora_modules=[
                f"{adapter.request.name}={adapter.request.path}",
                f"{WRITER}={adapter.placed('prefill')}",
                f"foreign={adapter.placed('both', tiny_model_path('qwen3'))}",
            ],
            block_size=32,
            max_model_len=512,
        ) as server,
        server.client() as client,
    ):
        yield client


def test_calls_and_sessions_name_adapters(
    client: httpx.Client, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    rng, base = random.Random(2), Oracle(tiny_model_path("llama"))
    tokens, header, name = random_tokens(rng, 50), random_tokens(rng, 3), adapter.request.name
    encoded = {name: adapter.oracle.encode(tokens), MODEL_NAME: base.encode(tokens)}
    oracles = {name: adapter.oracle, MODEL_NAME: base}
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    url, key = str(client.base_url), client.headers["Authorization"].removeprefix("Bearer ")
    with ChoreoClient(url, key, adapter=name) as c:
        assert c.stats()["adapter"] == name
        for writer in (name, MODEL_NAME):
            # That of the session, or that of the call.
            doc = c.prefill(tokens, adapter=None if writer == name else writer)
            for reader, oracle in oracles.items():
                answer = c.decode(header, parents=[doc], adapter=reader, sampling_params=params)
                read = oracle.encode(answer.token_ids, [whole(encoded[writer], 0)], 50)
                assert_choices(read, len(header))
                assert answer.usage.exact == (writer == reader)


def test_an_unknown_adapter_is_refused_with_those_that_are_known(
    client: httpx.Client, adapter: Adapter
) -> None:
    session = Session(client)
    for answer in (
        session.post({"content": "x", "adapter": "nobody"}),
        client.post("/v1/choreo/sessions", json={"adapter": "nobody"}),
    ):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "adapter"
        assert adapter.request.name in error["message"] and MODEL_NAME in error["message"]


def test_the_model_of_a_call_encodes_it(
    client: httpx.Client, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    session, rng = Session(client), random.Random(1)
    base = Oracle(tiny_model_path("llama"))
    oracles = {MODEL_NAME: base, adapter.request.name: adapter.oracle}
    tokens = random_tokens(rng, 50)
    session.call(type="prefill", content=tokens, save_as="doc")
    doc, header = base.encode(tokens), random_tokens(rng, 3)

    def answer(name: str, model: str, *parents: str) -> Any:
        xargs = {"choreo_session": session.id, "choreo_save_as": name, "choreo_parents": parents}
        body = {"model": model, "prompt": header, "vllm_xargs": xargs}
        sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        response = client.post("/v1/completions", json={**body, **sampling})
        assert response.status_code == 200, response.text
        message = session.message(name).json()
        assert len(message["generated_token_ids"]) == 8
        return message

    for model, oracle in oracles.items():
        first = answer(f"{model}-first", model, "doc")
        parents = [whole(doc, 0)]
        encoded = oracle.encode(first["token_ids"], parents, 50)
        assert_choices(encoded, len(header))
        # What an adapter encoded is read by everybody as it is.
        for reader, reading in oracles.items():
            second = answer(f"{model}-{reader}", reader, "doc", f"{model}-first")
            both = [*parents, whole(encoded, 50)]
            read = reading.encode(second["token_ids"], both, 50 + len(encoded))
            assert_choices(read, len(header))


def test_an_adapter_is_used_where_its_folder_says(
    client: httpx.Client, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    """By messages of a session, and not by answers, on either route; unless the session says so."""
    rng, base = random.Random(3), Oracle(tiny_model_path("llama"))
    tokens, header = random_tokens(rng, 50), random_tokens(rng, 3)
    read = [whole(adapter.oracle.encode(tokens), 0)]
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    url, key = str(client.base_url), client.headers["Authorization"].removeprefix("Bearer ")
    for placement, oracle in ((None, base), ("both", adapter.oracle)):
        with ChoreoClient(url, key, adapter=WRITER, placement=placement) as c:
            assert c.stats()["placement"] == (placement or "prefill")
            doc = c.prefill(tokens)
            answer = c.decode(header, parents=[doc], sampling_params=params)
            assert_choices(oracle.encode(answer.token_ids, read, 50), len(header))
            xargs = {"choreo_session": c.session, "choreo_parents": [doc.id]}
            body = {"model": WRITER, "prompt": header, "vllm_xargs": xargs, **params}
            response = client.post("/v1/completions", json=body)
            said = c.message(response.json()["choreo"]["id"])
            assert said.token_ids == answer.token_ids
            if placement is None:
                with pytest.raises(AdapterError, match=r"placement prefill.*leave it out"):
                    c.decode(header, parents=[doc], adapter=WRITER, sampling_params=params)
    # An ordinary request that names it is vLLM's, which knows no placement.
    ordinary = {**body, "vllm_xargs": None, "return_token_ids": True}
    (choice,) = client.post("/v1/completions", json=ordinary).json()["choices"]
    assert_choices(adapter.oracle.encode([*header, *choice["token_ids"]]), len(header))


def test_a_former_placement_warns_and_means_the_same(
    client: httpx.Client, adapter: Adapter
) -> None:
    url, key = str(client.base_url), client.headers["Authorization"].removeprefix("Bearer ")
    for former, placement in (("writer", "prefill"), ("reader", "decode")):
        asked = {"adapter": adapter.request.name, "placement": former}
        assert client.post("/v1/choreo/sessions", json=asked).json()["placement"] == placement
        with pytest.warns(DeprecationWarning, match=f'"{former}" is called "{placement}" now'):
            c = ChoreoClient(url, key, **asked)
        with c:
            assert c.stats()["placement"] == placement


def test_an_adapter_of_another_model_is_refused(client: httpx.Client) -> None:
    body = {"model": "foreign", "prompt": "x", "vllm_xargs": {"choreo_save_as": "x"}}
    for answer in (
        Session(client).post({"content": "x", "adapter": "foreign"}),
        client.post("/v1/choreo/sessions", json={"adapter": "foreign"}),
        client.post("/v1/choreo/sessions", json={"placement": "prefill"}),
        client.post("/v1/completions", json=body),
    ):
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] in ("adapter", "placement", "model"), error
        assert "trained on" in error["message"] or "adapter, too" in error["message"]

# SPDX-License-Identifier: Apache-2.0
"""Two servers of two models that differ in their weights alone, over one folder of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.engine.variants import make_variant
from tests.quick import NUM_LAYERS
from tests.server.serving import QUICK
from vllm_choreo import ChoreoClient
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
    reader_url: str


@pytest.fixture(scope="module")
def clients(
    shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("variants")
    variant = make_variant(shallow_model_path, folder)
    models = ModelIdentity.of(variant), ModelIdentity.of(shallow_model_path)
    cells = (Cell((), 1.0, 0.1, 9.0, 0.1), Cell(((1, NUM_LAYERS),), 0.1, 0.01, 9.0, 0.2))
    profile = PairProfile(
        models[0], models[1].weights, None, NUM_LAYERS, 9.0, cells, "", ((1, NUM_LAYERS),)
    )
    profile.save(folder / "pair.json")
    options: dict[str, Any] = {
        "choreo_keep": str(folder / "kept"),
        "choreo_pair": str(folder / "pair.json"),
        "settings": {"hidden_memory_gib": 0.1},
        **QUICK,
    }
    with (
        start_server(shallow_model_path, folder, **options) as one,
        start_server(variant, folder, **options) as other,
        ChoreoClient(one.base_url, KEYS[0]) as writer,
        ChoreoClient(other.base_url, KEYS[0]) as reader,
        ChoreoClient(other.base_url, KEYS[1]) as stranger,
    ):
        yield Clients(writer, reader, stranger, other.base_url)


def test_what_one_server_has_saved_the_other_one_reads(clients: Clients) -> None:
    writer, reader, stranger, _ = clients
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
    """No program saves or loads: both servers have the profile of their models."""
    writer, reader, stranger, url = clients
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
    with ChoreoClient(url, KEYS[0]) as another:
        chat = another.decode("So", parents=["a:b"], sampling_params=GREEDY)
        assert chat.usage.repaired_tokens > 0


def test_openai_requests_find_them_too(clients: Clients) -> None:
    writer, _, _, url = clients
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

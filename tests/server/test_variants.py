# SPDX-License-Identifier: Apache-2.0
"""Two servers of two models that differ in their weights alone, over one folder of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.serving import KEYS, start_server
from tests.engine.variants import make_variant
from tests.quick import NUM_LAYERS
from tests.server.serving import QUICK
from vllm_choreo import ChoreoClient
from vllm_choreo.errors import KeptError, UnknownKeptError

pytestmark = pytest.mark.exhaustive  # servers of its own

TEXTS = {
    "shed": "The shed behind the house is green, and nobody has painted it for many years.",
    "anna": "Anna owns a red bicycle, and she has lent it to a friend until the end of May.",
}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def clients(
    shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ChoreoClient]]:
    """Of one tenant on both servers, and of another one on the second."""
    folder = tmp_path_factory.mktemp("variants")
    variant = make_variant(shallow_model_path, folder)
    settings = {"hidden_memory_gib": 0.1}
    options: dict[str, Any] = {"choreo_keep": str(folder / "kept"), "settings": settings, **QUICK}
    with (
        start_server(shallow_model_path, folder, **options) as one,
        start_server(variant, folder, **options) as other,
        ChoreoClient(one.base_url, KEYS[0]) as writer,
        ChoreoClient(other.base_url, KEYS[0]) as reader,
        ChoreoClient(other.base_url, KEYS[1]) as stranger,
    ):
        yield [writer, reader, stranger]


def test_what_one_server_has_saved_the_other_one_reads(clients: list[ChoreoClient]) -> None:
    writer, reader, stranger = clients
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

    plain, some, own = read(), read(layers=(1, NUM_LAYERS)), read(layers=(0, NUM_LAYERS))
    assert plain.usage.encoded_tokens == plain.num_tokens
    num_tokens = sum(message.num_tokens for message in loaded)
    assert some.usage.repaired_tokens == own.usage.repaired_tokens == num_tokens
    assert own.usage.exact and not plain.usage.exact and not some.usage.exact
    made = [reader.prefill(text) for text in TEXTS.values()]
    text = reader.decode("So", parents=made, mode="exact", sampling_params=GREEDY)
    assert own.generated_token_ids == text.generated_token_ids
    assert plain.generated_token_ids != text.generated_token_ids

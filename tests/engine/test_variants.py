# SPDX-License-Identifier: Apache-2.0
"""One model's messages read by another: saved by an engine of A, loaded by one of B."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Encoded, Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY
from tests.engine.variants import make_variant
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import ChoreoError, KeptError, RepairError

_SETTINGS = {"choreo": {"hidden_memory_gib": 2**-9}}
_NUM_LAYERS = 3  # of all tiny models here
_NAMES = ("one", "two", "three")
_LAYERS: list[Any] = [(), (0, 3), (0, 1), (1, 2), (1, 3), (2, 3), [(0, 1), (2, 3)]]


@dataclass(frozen=True)
class Pair:
    """Models that differ in their weights alone, and what A has encoded and saved.

    Attributes:
        llm: of B.
        kept: the folder.
        reader: the oracle of B, which reads what that of A has encoded.
        encoded: by A, in the order of `_NAMES`; the second has read the first.
    """

    llm: Any
    kept: Path
    reader: LayerOracle
    encoded: list[Encoded]


@pytest.fixture(scope="module", params=sampled(("llama", "qwen3", "gpt_oss"), 1))
def pair(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    path, folder = tiny_model_path(request.param), tmp_path_factory.mktemp("pair")
    variant = make_variant(path, folder)
    rng, writer = random.Random(3), LayerOracle(tiny_oracle(request.param))
    encoded: list[Encoded] = []
    with Choreography(engine_slot(path, additional_config=_SETTINGS)) as c:
        for name in _NAMES:
            read = encoded[:1] if name == "two" else []
            message = c.prefill(
                random_tokens(rng, 50),
                parents=["one"] if read else [],
                save_as=name,
                keep_hidden=[1, 2],
            )
            parents = [Parent(one, 0, 0, 50) for one in read]
            encoded.append(writer.encode(message.token_ids, parents, 50 * len(parents)))
        c.save(None, folder / "kept", encodings=True)
    reader = LayerOracle(Oracle(variant), writer)
    llm = engine_slot(variant, additional_config=_SETTINGS)
    return Pair(llm, folder / "kept", reader, encoded)


@pytest.mark.parametrize("seed", sampled(range(12), 4))
def test_any_layers_are_those_of_the_reading_model(pair: Pair, seed: int) -> None:
    """Against the dense oracle of B that is given A's hidden states, keys and values."""
    rng = random.Random(seed)
    with Choreography(pair.llm) as c:
        c.load(pair.kept, on_mismatch="variant")
        for layers in rng.sample(_LAYERS, 3):
            spans, parents, offset = [], [], 0
            for number in rng.choices(range(3), k=rng.randint(1, 3)):
                start = rng.choice((0, 0, rng.randrange(50)))
                offset += rng.choice((0, 0, 30))
                spans.append((_NAMES[number], start, 50))
                parents.append(Parent(pair.encoded[number], offset, start, 50))
                offset += 50 - start
            header = random_tokens(rng, rng.choice((1, 20)))
            answer = c.decode(
                header,
                parents=spans,
                offsets=[parent.offset for parent in parents],
                new_offset=offset,
                layers=layers,
                sampling_params=GREEDY,
            )
            ranges = [layers] if layers and isinstance(layers[0], int) else layers
            read = pair.reader.repair(parents, [range(*ends) for ends in ranges])
            expected = pair.reader.encode(answer.token_ids, read, offset)
            check_tokens(answer, expected, len(header), LOGPROB_TOLERANCE, TIE_MARGIN)
            assert layers == (0, _NUM_LAYERS) or not answer.usage.exact


def test_nothing_of_another_model_passes_for_ones_own(pair: Pair) -> None:
    with Choreography(pair.llm) as c:
        with pytest.raises(KeptError, match="weights"):
            c.load(pair.kept)
        c.load(pair.kept, on_mismatch="variant")
        tokens = pair.encoded[0].token_ids
        own = c.prefill(tokens)
        assert own.usage.reused_tokens == 0, "no twin of what the other model made"
        plain = c.decode([5], parents=["one"], sampling_params=GREEDY)
        assert not plain.usage.exact
        exact = c.decode([5], parents=["one"], mode="exact", sampling_params=GREEDY)
        assert (exact.usage.exact and exact.usage.reused_tokens == 0) or exact.usage.exact
        text = c.decode([5], parents=[own], sampling_params=GREEDY)
        assert exact.generated_token_ids == text.generated_token_ids
        with pytest.raises(RepairError, match="keep_hidden"):
            c.decode([5], parents=["one", own], layers=(2, 3), sampling_params=GREEDY)
        c.evict("one")
        with pytest.raises(ChoreoError, match="another model, "):
            c.decode([5], parents=["one"], sampling_params=GREEDY)
        assert c.decode([5], parents=["three"], sampling_params=GREEDY).token_ids
    with Choreography(pair.llm) as c:
        assert c.stats()["num_hidden_bytes"] == 0


def test_damaged_files_of_another_model_are_refused(pair: Pair, tmp_path: Path) -> None:
    """This one could not encode their messages."""
    for path in pair.kept.iterdir():
        content = path.read_bytes()
        cut = content[:-9] if path.suffix == ".safetensors" else content
        (tmp_path / path.name).write_bytes(cut)
    with Choreography(pair.llm) as c:
        with pytest.raises(KeptError, match="damaged"):
            c.load(tmp_path, on_mismatch="variant")
        assert c.stats()["num_messages"] == c.stats()["num_hidden_bytes"] == 0


def test_another_models_messages_are_saved_under_its_name(pair: Pair, tmp_path: Path) -> None:
    with Choreography(pair.llm) as c:
        c.load(pair.kept, on_mismatch="variant")
        said = c.decode([5], parents=["one"], sampling_params=GREEDY).generated_token_ids
        c.save(["one"], tmp_path / "again", encodings=True)
    with Choreography(pair.llm) as c:
        c.load(tmp_path / "again")
        again = c.decode([5], parents=["one"], sampling_params=GREEDY)
        assert again.generated_token_ids == said and not again.usage.exact


def test_what_is_no_variant_is_refused(
    pair: Pair, engine_slot: Callable[..., Any], tmp_path: Path
) -> None:
    variant = Path(pair.llm.llm_engine.model_config.model)
    other = tmp_path / "other"
    other.mkdir()
    for file in variant.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    rope["rope_theta"] = 2 * rope.get("rope_theta", 10000.0)
    (other / "config.json").write_text(json.dumps(config))
    llm = engine_slot(other, additional_config=_SETTINGS)
    with Choreography(llm) as c, pytest.raises(KeptError, match="rotation"):
        c.load(pair.kept, on_mismatch="variant")

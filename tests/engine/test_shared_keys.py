# SPDX-License-Identifier: Apache-2.0
"""Models whose last layers read the keys and values of earlier ones: Gemma 3n, Gemma 4 E2B."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    Draw,
    check,
    draw_choreography,
    side_by_side,
)
from tests.engine.feature_machine import invariants
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.utility import call
from vllm_choreo.engine.worker.layer_checks import check_own_keys, check_sharing, check_sizes
from vllm_choreo.errors import UnsupportedModelError, UnsupportedOptionError
from vllm_choreo.testing import laws
from vllm_choreo.testing.models.tiny import TINY_MODELS, make_tiny_model

# Of six layers the last two read what the third and the fourth store.
_SHARING = {
    **{key: TINY_MODELS["gemma3"].config().to_dict()[key] for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
        "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
    )},
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gemma4": lambda: transformers.Gemma4TextConfig(**_SHARING, global_head_dim=32),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **_SHARING, altup_num_inputs=2, laurel_rank=16
    ),
}
_NEAR = Draw(max_tokens=8, max_length=40)
_SEEDS = [range(3100, 3101), *(range(first, first + 10) for first in range(3101, 3161, 10))]

Slot = Callable[..., Any]
Paths = Callable[[str], Path]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("shared")
            made[name] = make_tiny_model(name, folder, config=CONFIGS[name]())
        return made[name]

    return path


@pytest.fixture(scope="module")
def oracle(path_of: Paths) -> Oracle:
    return Oracle(path_of("gemma4"))


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_choreographies(
    engine_slot: Slot, path_of: Paths, oracle: Oracle, seeds: range
) -> None:
    with Choreography(engine_slot(path_of("gemma4"))) as c:
        drawn = [draw_choreography(seed, _NEAR) for seed in seeds]
        check(c, oracle, side_by_side(drawn))


@pytest.mark.parametrize("law", sampled(laws.LAWS, 1))
@pytest.mark.parametrize("name", sampled(CONFIGS, 1))
def test_law(engine_slot: Slot, path_of: Paths, name: str, law: str) -> None:
    """Of Gemma 3n this alone: vLLM's pass of it is not HuggingFace's, without the plugin, too."""
    measured = list(laws.LAWS[law](laws.Subject(engine_slot(path_of(name)), 511)))
    assert measured and max(measured) < LOGPROB_TOLERANCE, measured


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [{"reposition": "in_place", "host_memory_gib": 0.01}, {"window_groups": True}],
    ids=str,
)
def test_in_a_small_pool(
    engine_slot: Slot, path_of: Paths, oracle: Oracle, settings: dict[str, Any]
) -> None:
    """What is copied, moved and given up is what layers store, once."""
    room = {"num_gpu_blocks_override": 25, "max_model_len": 24 * 32}
    if "window_groups" in settings:
        room["num_gpu_blocks_override"] = 49  # of three groups
    llm = engine_slot(path_of("gemma4"), **room, additional_config={"choreo": settings})
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner
    assert [len(runner.layers), len(runner.sharing_layers)] == [4, 2]
    if runner.host_blocks is not None:
        tier = _scheduler(llm).store.tier
        assert {len(copy) for copy in runner.host_blocks.copies} == {tier.num_blocks}
    draw = replace(_NEAR, max_parents=2, max_offset=300)
    for first in range(3200, 3212, 3):
        with Choreography(llm) as c:
            drawn = [draw_choreography(seed, draw) for seed in range(first, first + 3)]
            check(c, oracle, side_by_side(drawn))
            invariants.check(_scheduler(llm))
    name = "restored_messages_total" if runner.host_blocks else "encoded_again_messages_total"
    assert call(llm, "totals").get(name, 0)


@pytest.mark.exhaustive
def test_saved_messages_are_read_again(
    engine_slot: Slot, path_of: Paths, oracle: Oracle, tmp_path: Path
) -> None:
    llm, rng = engine_slot(path_of("gemma4")), random.Random(5)
    tokens = [random_tokens(rng, n) for n in (40, 33)]
    with Choreography(llm) as c:
        for name, text in zip("ab", tokens, strict=True):
            c.prefill(text, save_as=name)
        assert c.save(["a", "b"], tmp_path / "kept", encodings=True).encodings == 2
    encoded = [oracle.encode(text) for text in tokens]
    with Choreography(llm) as c:
        a, b = c.load(tmp_path / "kept")
        answer = c.decode([7, 8], parents=[b, a], sampling_params=laws.greedy(8))
        assert answer.usage.encoded_tokens == 2 + 8
        assert_greedy(answer, oracle, [whole(encoded[1], 0), Parent(encoded[0], 33, 0, 40)], 73)


# -- refusals ------------------------------------------------------------------------------------

_LAYERS: Any = {
    "layers.0": SimpleNamespace(kv_sharing_target_layer_name=None),
    "layers.1": SimpleNamespace(kv_sharing_target_layer_name="layers.0"),
}
_SHARED: Any = {"layers.1": _LAYERS["layers.1"]}


@pytest.mark.exhaustive
def test_layers_of_several_sizes_are_refused_when_the_engine_starts(
    engine_slot: Slot, tmp_path: Path
) -> None:
    """As Gemma 4 E2B has them: heads of 512 numbers with full attention, of 256 with windows."""
    config = transformers.Gemma4TextConfig(**_SHARING, global_head_dim=64)
    path = make_tiny_model("gemma4", tmp_path, config=config)
    with pytest.raises(UnsupportedModelError, match="in several sizes") as caught:
        engine_slot(path)
    assert caught.value.value == "model.layers.4.self_attn.attn"


def test_sizes_matter_only_where_keys_are_shared() -> None:
    specs: Any = {f"layers.{n}": SimpleNamespace(page_size_bytes=64 * (n + 1)) for n in range(2)}
    with pytest.raises(UnsupportedModelError, match="blocks of 64 and 128 bytes") as caught:
        check_sizes(specs, _LAYERS)
    assert caught.value.value == "layers.1"
    check_sizes(specs, {"layers.0": _LAYERS["layers.0"]})
    check_sizes({"layers.0": specs["layers.0"]}, _LAYERS)


def test_options_that_run_layers_apart_are_refused() -> None:
    usual: Any = SimpleNamespace(kv_sharing_fast_prefill=False)
    fast: Any = SimpleNamespace(kv_sharing_fast_prefill=True)
    hidden = replace(ChoreoConfig(), hidden_memory_gib=0.1)
    for config, cache, parameter in (
        (hidden, usual, "additional_config.choreo.hidden_memory_gib"),
        (ChoreoConfig(), fast, "kv_sharing_fast_prefill"),
    ):
        with pytest.raises(UnsupportedOptionError, match=r"layers\.1.*leave it out") as caught:
            check_sharing(_SHARED, config, cache)
        assert caught.value.parameter == parameter
        check_sharing({}, config, cache)
    check_sharing(_SHARED, ChoreoConfig(), usual)


def test_a_drafter_that_reads_the_keys_of_others_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 of the drafter.*layers\.0"):
        check_own_keys(_LAYERS)
    check_own_keys({"layers.0": _LAYERS["layers.0"]})

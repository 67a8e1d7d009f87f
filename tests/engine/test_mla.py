# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on the real engine in float32, against the dense oracle.

HuggingFace makes keys and values of each head from the latents that the oracle gathers, and knows
nothing of the absorbed way. The seven laws are in `test_laws.py`, programs of all features at once
in `feature_machine`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography, side_by_side
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from tests.engine.test_layers import LayersProgram
from tests.engine.test_repair import RunsProgram
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine import mla
from vllm_choreo.engine.utility import call
from vllm_choreo.engine.worker.cpu_rotary import correct_rotary
from vllm_choreo.errors import UnsupportedOptionError

TOLERANCE = 1e-4
BLOCK_SIZE = 16  # the one that vLLM's kernel takes
NAMES = sampled(("deepseek_v3", "deepseek_v2"), 1)
# Three layers of rows of 576 numbers.
_BLOCK_GIB = 3 * BLOCK_SIZE * 576 * 4 / 2**30
# 2,048 tokens: choreographies side by side hold more.
_SMALL = {"num_gpu_blocks_override": 129, "max_num_batched_tokens": 128}
_ALL = {
    **_SMALL,
    "additional_config": {
        "choreo": {"host_memory_gib": 400 * _BLOCK_GIB, "hidden_memory_gib": 2 / 1024}
    },
}
_GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of each tiny model with MLA in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(name: str, tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle(name)


@pytest.fixture
def small(
    name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Any:
    """Engine with a small pool and nothing beside it."""
    return engine_slot(tiny_model_path(name), **_SMALL)


@pytest.fixture
def full(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    """Engine with a small pool, host memory, and memory for hidden states."""
    return engine_slot(tiny_model_path(name), **_ALL)


def _totals(llm: Any) -> dict[str, int]:
    found: dict[str, int] = call(llm, "totals")
    return found


# 10 and 50 choreographies of each model.
@pytest.mark.parametrize("first", sampled(range(7000, 7060, 10), 1))
def test_random_choreographies_in_a_small_pool(small: Any, oracle: Oracle, first: int) -> None:
    """Prompts in chunks; messages are evicted and encoded again."""
    before = _totals(small)
    with Choreography(small) as c:
        drawn = [draw_choreography(seed) for seed in range(first, first + 10)]
        assert check(c, oracle, side_by_side(drawn), TOLERANCE) < TOLERANCE
    after = _totals(small)
    assert after["evicted_messages_total"] > before.get("evicted_messages_total", 0)
    assert after["num_free_blocks"] == before["num_free_blocks"]


def test_ordinary_requests_in_chunks_and_on_cached_prefixes(small: Any, oracle: Oracle) -> None:
    """vLLM's own attention cannot go on behind what is computed; prompts longer than a step do."""
    rng = random.Random(3)
    text = random_tokens(rng, 300)
    prompts = [text, [*text[:200], *random_tokens(rng, 7)], random_tokens(rng, 40)]
    small.reset_prefix_cache()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    cached = []
    for each in inputs:
        (output,) = small.generate(each, _GREEDY, use_tqdm=False)
        cached.append(output.num_cached_tokens)
        _assert_plain(output, oracle)
    assert cached == [0, 192, 0]
    for output in small.generate(inputs, _GREEDY, use_tqdm=False):
        _assert_plain(output, oracle)


def _assert_plain(output: Any, oracle: Oracle) -> None:
    """An ordinary request's log-probabilities are those of the text."""
    answer, given = output.outputs[0], list(output.prompt_token_ids)
    rows = oracle.plain_logits([*given, *answer.token_ids]).log_softmax(-1)[len(given) - 1 :]
    for row, reported in zip(rows, answer.logprobs, strict=False):
        for token_id, entry in reported.items():
            assert abs(float(row[token_id]) - entry.logprob) < TOLERANCE


def test_a_token_is_one_row_of_a_layer(small: Any) -> None:
    """Values are a part of it: it is read once."""
    core = small.llm_engine.engine_core.engine_core
    batcher = core.model_executor.driver_worker.worker.model_runner.batcher
    assert {kind.token_bytes for kind in batcher.kinds} == {576 * 4}


def test_rotary_embeddings_of_parts_of_rows_are_put_right(small: Any) -> None:
    """vLLM's operator for CPUs turns something else; once it does not, `cpu_rotary` can go."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = small.llm_engine.vllm_config
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    with set_current_vllm_config(config):
        rotary = get_rope(64, 512, is_neox_style=False, rope_parameters=rope, dtype=torch.float32)
    positions, rows = torch.arange(5) + 3, torch.randn(5, 4, 96)
    angles = positions[:, None, None] / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    pairs = torch.view_as_complex(rows[..., 32:].unflatten(-1, (32, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    wrong, _ = rotary.forward_cpu(positions, rows.clone()[..., 32:], torch.zeros(5, 1, 64))
    assert float((wrong - expected).abs().max()) > 0.1
    correct_rotary(torch.nn.ModuleList([rotary]))
    right, _ = rotary(positions, rows.clone()[..., 32:], torch.zeros(5, 1, 64))
    torch.testing.assert_close(right, expected)


def test_evicted_messages_come_back_from_host_memory(full: Any, oracle: Oracle) -> None:
    rng, before = random.Random(1), _totals(full)
    with Choreography(full) as c:
        tokens = [random_tokens(rng, rng.randrange(100, 200)) for _ in range(20)]
        docs = [(c.prefill(each), oracle.encode(each)) for each in tokens]
        for _ in range(6):
            chosen = rng.sample(docs, 3)
            offsets = [rng.randrange(0, 300) for _ in chosen]
            answer = c.decode(
                random_tokens(rng, 3),
                parents=[message for message, _ in chosen],
                offsets=offsets,
                new_offset=300,
                sampling_params=_GREEDY,
            )
            pairs = zip(chosen, offsets, strict=True)
            read = [whole(encoded, offset) for (_, encoded), offset in pairs]
            assert_greedy(answer, oracle, read, 300)
        after = _totals(full)
    restored = after["restored_messages_total"] - before.get("restored_messages_total", 0)
    assert restored >= 5
    assert after.get("encoded_again_messages_total", 0) == before.get(
        "encoded_again_messages_total", 0
    )


@pytest.mark.parametrize("seed", sampled(range(300, 312), 1))
def test_random_repairs(full: Any, oracle: Oracle, seed: int) -> None:
    with Choreography(full) as c:
        program = RunsProgram(c, oracle, random.Random(seed))
        for _ in range(6):
            program.step()


@pytest.mark.parametrize("seed", sampled(range(320, 332), 1))
def test_random_layers(full: Any, oracle: Oracle, seed: int) -> None:
    with Choreography(full) as c:
        program = LayersProgram(c, LayerOracle(oracle), random.Random(seed))
        for _ in range(6):
            program.step()


def test_exact_mode_gives_the_text(full: Any, oracle: Oracle) -> None:
    rng = random.Random(5)
    texts = [random_tokens(rng, n) for n in (40, 33, 21)]
    with Choreography(full) as c:
        docs = [c.prefill(text) for text in texts]
        answer = c.decode([5, 6], parents=docs, mode="exact", sampling_params=_GREEDY)
        assert answer.usage.exact
        given = [token for text in texts for token in text]
        rows = oracle.plain_logits([*given, *answer.token_ids]).log_softmax(-1)[len(given) + 1 :]
        for row, reported in zip(rows, answer.logprobs, strict=False):
            for token_id, entry in reported.items():
                assert abs(float(row[token_id]) - entry.logprob) < TOLERANCE


def _answers(c: Choreography, docs: Sequence[Any]) -> list[Any]:
    """What readers say of two messages, at several places, and of a part."""
    a, b = docs
    calls: list[dict[str, Any]] = [
        {"parents": [a, b]},
        {"parents": [b, (a, 5, 40)], "offsets": [100, 3], "new_offset": 200},
    ]
    made = [c.decode([5, 6, 7], **named, sampling_params=_GREEDY) for named in calls]
    found = [[{t: p.logprob for t, p in at.items()} for at in answer.logprobs] for answer in made]
    c.free(*made)
    return found


def test_saved_messages_are_loaded_without_encoding(full: Any, tmp_path: Path) -> None:
    rng = random.Random(6)
    with Choreography(full) as c:
        docs = [c.prefill(random_tokens(rng, 50), save_as=f"doc{i}") for i in range(2)]
        _answers(c, docs)
        before = _answers(c, docs)
        c.save(docs, str(tmp_path / "kept"), encodings=True)
    with Choreography(full) as c:
        docs = c.load(str(tmp_path / "kept"))
        assert all(m["num_encoded"] == m["num_tokens"] for m in c.stats()["messages"])
        _answers(c, docs)
        assert _answers(c, docs) == before


@pytest.fixture
def in_place(
    name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Any:
    options = {"additional_config": {"choreo": {"reposition": "in_place"}}}
    return engine_slot(tiny_model_path(name), **_SMALL, **options)


@pytest.mark.exhaustive
def test_moved_keys_equal_the_oracle(in_place: Any, oracle: Oracle) -> None:
    """Of a row the columns behind the latent are turned, again and again, or in a copy."""
    rng = random.Random(7)
    with Choreography(in_place) as c:
        a, b = c.prefill(random_tokens(rng, 50)), c.prefill(random_tokens(rng, 40))
        oracle_a, oracle_b = oracle.encode(a.token_ids), oracle.encode(b.token_ids)
        for _ in range(4):
            at, bt = rng.randrange(300), rng.randrange(300)
            answer = c.decode(
                [5], parents=[a, b], offsets=[at, bt], new_offset=200, sampling_params=_GREEDY
            )
            assert_greedy(answer, oracle, [whole(oracle_a, at), whole(oracle_b, bt)], 200)
        positions = {m["id"]: m["stored_position"] for m in c.stats()["messages"]}
        assert positions[a.id] != 0 and positions[b.id] != 0
        offsets = [rng.randrange(300) for _ in range(3)]
        calls = [
            {"header": [6], "parents": [a, (b, 7, 35)], "offsets": [x, 250], "new_offset": 100}
            for x in offsets
        ]
        for answer, x in zip(c.decode(calls, sampling_params=_GREEDY), offsets, strict=True):
            read = [whole(oracle_a, x), Parent(oracle_b, 250, 7, 35)]
            assert_greedy(answer, oracle, read, 100)


# -- what is refused -------------------------------------------------------------------------------


def _config(backend: str | None = None, lora: object = None, **model: Any) -> Any:
    text = SimpleNamespace(**{"kv_lora_rank": 512, "qk_rope_head_dim": 64, **model})
    named = None if backend is None else SimpleNamespace(name=backend)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, model="a model"),
        attention_config=SimpleNamespace(backend=named),
        lora_config=lora,
    )


@pytest.mark.parametrize(
    ("reason", "is_cpu", "config"),
    [
        ("indexer", True, _config(index_topk=2048)),
        ("borders at fixed positions", True, _config(compress_ratios=[4, 128])),
        ("indexer", False, _config(index_topk=2048)),
        ("TRITON_MLA alone, not FLASH_ATTN_MLA", False, _config(backend="FLASH_ATTN_MLA")),
        ("TRITON_MLA alone, not FLASHMLA", False, _config(backend="FLASHMLA")),
        ("TRITON_MLA alone, not CPU_MLA", False, _config(backend="CPU_MLA")),
        ("adapters do not work with MLA", False, _config(lora=object())),
        (r"this model has \(256, 64\)", False, _config(kv_lora_rank=256)),
        ("CPU_MLA alone, not AMX_MLA", True, _config(backend="AMX_MLA")),
        ("adapters do not work with MLA", True, _config(lora=object())),
        (r"this model has \(256, 32\)", True, _config(kv_lora_rank=256, qk_rope_head_dim=32)),
    ],
)
def test_what_cannot_be_choreographed_is_refused_by_name(
    reason: str, is_cpu: bool, config: Any
) -> None:
    with pytest.raises(UnsupportedOptionError, match=reason) as caught:
        mla.refuse_unsupported(config, is_cpu)
    assert caught.value.parameter == "use_mla" and 'VLLM_PLUGINS=""' in caught.value.message
    for config in (_config(), _config("CPU_MLA")):
        mla.refuse_unsupported(config, is_cpu=True)
    for config in (_config(), _config("TRITON_MLA")):
        mla.refuse_unsupported(config, is_cpu=False)

# SPDX-License-Identifier: Apache-2.0
"""Models that scale queries by their position, beyond the random choreographies."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography
from tests.engine.oracle import Oracle, assert_greedy, random_tokens, whole
from vllm_choreo import Choreography
from vllm_choreo.errors import OffsetError, RepairError
from vllm_choreo.testing.models.tiny import make_tiny_model

_IN_PLACE = {"choreo": {"reposition": "in_place"}}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("ministral3"))


def test_what_was_evicted_comes_back_where_it_stood(
    llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    oracle, rng = tiny_oracle("ministral3"), random.Random(3)
    with Choreography(llm) as c:
        far = c.decode(random_tokens(rng, 60), new_offset=700, sampling_params=_GREEDY)
        again = c.prefill(far.token_ids[:60], new_offset=200)
        expected = [oracle.encode(far.token_ids, (), 700), oracle.encode(again.token_ids, (), 200)]
        for _ in range(2):
            answer = c.decode(
                [5], parents=[far, again], offsets=[90, 10], new_offset=160,
                sampling_params=_GREEDY,
            )  # fmt: skip
            assert_greedy(answer, oracle, [whole(expected[0], 90), whole(expected[1], 10)], 160)
            c.evict(far, again)


def test_a_text_begins_at_position_0(llm: Any) -> None:
    with Choreography(llm) as c:
        here, there = c.prefill([5, 6, 7]), c.prefill([5, 6, 7], new_offset=40)
        assert here.usage.exact and not there.usage.exact
        chained = c.decode([9], parents=[there], offsets=[40], sampling_params=_GREEDY)
        assert not chained.usage.exact
        with pytest.raises(OffsetError, match="begins at position 0"):
            c.decode([9], parents=[here], offsets=[40], mode="exact", sampling_params=_GREEDY)


def test_repair_is_refused(llm: Any) -> None:
    with Choreography(llm) as c:
        parents = [c.prefill([5, 6, 7]), c.prefill([8, 9, 10])]
        with pytest.raises(RepairError, match="scales queries by their position"):
            c.decode([9], parents=parents, repair="first:2", sampling_params=_GREEDY)


def test_keys_that_move(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """Queries keep their scale where keys are rotated instead of them."""
    path = tiny_model_path("ministral3")
    engine, oracle = engine_slot(path, additional_config=_IN_PLACE), Oracle(path)
    with Choreography(engine) as c:
        for seed in range(3):
            check(c, oracle, draw_choreography(seed))


def test_llama4(
    tmp_path: Path, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """Layers without rotation scale: the chain, against ordinary requests of the same engine.

    `transformers` scales by the index in the batch, not by the position that it is given.
    """
    sizes = transformers.AutoConfig.from_pretrained(tiny_model_path("ministral3"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings")  # fmt: skip
    config = transformers.Llama4TextConfig(
        **{name: getattr(sizes, name) for name in names}, intermediate_size_mlp=192,
        num_local_experts=2, interleave_moe_layer_step=4, no_rope_layers=[1, 0, 1],
        attention_chunk_size=None, floor_scale=32, attn_scale=0.3, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    path = make_tiny_model("llama4", tmp_path, config=config)
    generation = transformers.GenerationConfig(attn_temperature_tuning=True)
    generation.save_pretrained(path)
    engine = engine_slot(path)
    rng = random.Random(1)
    pieces = [random_tokens(rng, n) for n in (70, 9, 200, 3)]
    with Choreography(engine) as c:
        chain: list[Any] = []
        for piece in pieces[:-1]:
            chain.append(c.prefill(piece, parents=chain))
        answer = c.decode(pieces[-1], parents=chain, sampling_params=_GREEDY)
    assert answer.usage.exact
    (found,) = engine.generate([{"prompt_token_ids": sum(pieces, [])}], _GREEDY, use_tqdm=False)
    assert list(answer.generated_token_ids) == list(found.outputs[0].token_ids)
    for ours, theirs in zip(answer.logprobs, found.outputs[0].logprobs, strict=True):
        for token, entry in theirs.items():
            assert abs(entry.logprob - ours[token].logprob) < 5e-4

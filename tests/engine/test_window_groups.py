# SPDX-License-Identifier: Apache-2.0
"""Layers with sliding windows as KV cache groups of their own: results, gaps, memory, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.angles_oracle import AnglesOracle
from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    Draw,
    check,
    draw_choreography,
    run_choreography,
    side_by_side,
)
from tests.engine.feature_machine import invariants
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.cli.inspect import block_map
from vllm_choreo.engine.utility import call
from vllm_choreo.testing import laws
from vllm_choreo.testing.models.tiny import make_tiny_model

MODELS = ["gemma3", "gpt_oss", "mistral_window"]
ON: dict[str, Any] = {"additional_config": {"choreo": {"window_groups": True}}}
# 2,048 tokens in each of three groups; of a window fewer are kept.
SMALL: dict[str, Any] = {**ON, "num_gpu_blocks_override": 101, "max_num_batched_tokens": 128}
# Gaps are in messages of three blocks at least.
_LONG = Draw(max_tokens=8, max_length=190)
_GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5}
_SEEDS = [range(9000, 9002), *(range(first, first + 10) for first in range(9002, 9102, 10))]
# With the engine's own angles; the most found is 3e-5.
_TOLERANCE = 1e-4

Slot = Callable[..., Any]
Paths = Callable[[str], Path]


def _params(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{**_GREEDY, **options})


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _encoded_again(llm: Any) -> int:
    return int(call(llm, "totals").get("encoded_again_messages_total", 0))


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(name: str, engine_slot: Slot, tiny_model_path: Paths) -> Any:
    """Engine with groups, and a pool in which everything fits."""
    return engine_slot(tiny_model_path(name), **ON)


@pytest.fixture
def small(name: str, engine_slot: Slot, tiny_model_path: Paths) -> Any:
    return engine_slot(tiny_model_path(name), **SMALL)


@pytest.fixture(scope="module")
def oracle(name: str, tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle(name)


@pytest.fixture(scope="module")
def angles(name: str, engine_slot: Slot, tiny_model_path: Paths) -> AnglesOracle:
    path = tiny_model_path(name)
    return AnglesOracle(path, engine_slot(path, **ON))


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", laws.LAWS)
def test_law(llm: Any, law: str) -> None:
    measured = list(laws.LAWS[law](laws.Subject(llm, 511)))
    assert measured and max(measured) < LOGPROB_TOLERANCE, measured


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_choreographies(llm: Any, angles: AnglesOracle, seeds: range) -> None:
    before = _encoded_again(llm)
    with Choreography(llm) as c:
        drawn = [draw_choreography(seed, _LONG) for seed in seeds]
        check(c, angles, side_by_side(drawn), _TOLERANCE)
    assert _encoded_again(llm) > before, "parts of messages were read that had been given up"
    invariants.check_nothing_is_left(_scheduler(llm))


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 0, 2), ids=str)
def test_random_choreographies_in_a_small_pool(
    small: Any, angles: AnglesOracle, seeds: range
) -> None:
    before = call(small, "totals")
    with Choreography(small) as c:
        drawn = [draw_choreography(seed, _LONG) for seed in seeds]
        check(c, angles, side_by_side(drawn), _TOLERANCE)
    after = call(small, "totals")
    if len(seeds) > 2:
        name = "evicted_messages_total"
        assert after.get(name, 0) > before.get(name, 0)
    invariants.check_nothing_is_left(_scheduler(small))


@pytest.mark.exhaustive
def test_the_seed_that_float32_angles_decide(engine_slot: Slot, tiny_model_path: Paths) -> None:
    """With one group, too, what is left of the difference is that of angles, not of groups."""
    path, found = tiny_model_path("gemma3"), []
    for options in ({}, ON):
        engine = engine_slot(path, **options)
        for oracle in (Oracle(path), AnglesOracle(path, engine)):
            with Choreography(engine) as c:
                found.append(check(c, oracle, draw_choreography(9004, _LONG), 2e-3, 2e-3))
    assert min(found[::2]) > LOGPROB_TOLERANCE > _TOLERANCE > max(found[1::2]), found


class Counted:
    """A session that notes, after each call, how many messages were encoded again by then."""

    def __init__(self, engine: Any, session: Choreography) -> None:
        self.engine, self.session = engine, session
        self.counts: list[int] = []

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.session.prefill(*args, **kwargs))

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.session.decode(*args, **kwargs))

    def _noted(self, message: Any) -> Any:
        self.counts.append(_encoded_again(self.engine))
        return message


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gemma3", "gpt_oss"])
def test_results_are_those_of_one_group_bit_for_bit(
    model: str, engine_slot: Slot, tiny_model_path: Paths
) -> None:
    """Up to the first call for which something is encoded again, then to rounding.

    Calls run one by one: so the same tokens run side by side.
    """
    found: list[list[tuple[Any, int]]] = []
    for options in ({}, ON):
        engine, answers = engine_slot(tiny_model_path(model), **options), list[tuple[Any, int]]()
        for seed in range(9100, 9112):
            calls = [[one] for batch in draw_choreography(seed, _LONG) for one in batch]
            before = _encoded_again(engine)
            with Choreography(engine) as session:
                counted: Any = Counted(engine, session)
                ran = run_choreography(counted, calls)
            num_again = [count - before for count in counted.counts]
            answers += zip([one.message for one in ran], num_again, strict=True)
        found.append(answers)
    num_same = 0
    for (one, _), (grouped, num_again) in zip(*found, strict=True):
        if one.token_ids != grouped.token_ids:
            break  # where two tokens are as likely, what follows is another text
        if num_again:
            assert one.logprobs is None or laws.difference(one, grouped) < LOGPROB_TOLERANCE
        else:
            assert one.logprobs == grouped.logprobs
            num_same += one.logprobs is not None
    assert num_same > 30 and any(num_again for _, num_again in found[1])


def test_ordinary_requests_find_their_prefixes(llm: Any, oracle: Oracle) -> None:
    """vLLM's hybrid coordinator and its prefix cache, beside calls whose keys stay out of it."""
    rng, text = random.Random(5), random_tokens(random.Random(4), 160)
    llm.reset_prefix_cache()
    with Choreography(llm) as c:
        document = c.prefill(text)
        c.decode(random_tokens(rng, 5), parents=[document], sampling_params=_params())
        for num_cached in (0, 160):
            request = {"prompt_token_ids": [*text, *random_tokens(rng, 3)]}
            (output,) = llm.generate(request, _params(1), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            expected = oracle.plain_logits(request["prompt_token_ids"]).log_softmax(-1)[-1]
            for token_id, reported in output.outputs[0].logprobs[0].items():
                assert abs(float(expected[token_id]) - reported.logprob) < LOGPROB_TOLERANCE


# -- gaps ----------------------------------------------------------------------------------------


def test_a_part_that_was_given_up_is_encoded_again(llm: Any, oracle: Oracle) -> None:
    """Its middle, read from right behind that; its beginning, from beside it; then its end."""
    tokens = random_tokens(random.Random(7), 250)
    with Choreography(llm) as c:
        document, before = c.prefill(tokens), _encoded_again(llm)
        encoded = oracle.encode(tokens)

        def ask(start: int, stop: int, new_offset: int) -> int:
            header = [5, 6, 7]
            answer = c.decode(
                header,
                parents=[(document, start, stop)],
                offsets=[0],
                new_offset=new_offset,
                sampling_params=_params(40),
            )
            assert_greedy(answer, oracle, [Parent(encoded, 0, start, stop)], new_offset)
            return _encoded_again(llm) - before

        assert "of layers with windows of" in block_map(c.stats())
        assert ask(0, 250, 250) == 0
        assert ask(0, 250, 1500) == 0, "it sees nothing in layers with windows"
        assert ask(100, 150, 50) == 1
        assert ask(0, 100, 100) == 1, "it stays whole"
        assert ask(0, 250, 0) == 1
        c.evict(document)
        assert ask(0, 250, 250) == 2
        assert ask(0, 250, 100) == 3, "what comes back from the recipe has its end alone"


def test_gaps_are_closed_while_others_read(small: Any, oracle: Oracle) -> None:
    """Readers of the end run on; whoever sees the middle waits for his blocks alone."""
    tokens, rng = random_tokens(random.Random(8), 300), random.Random(9)
    with Choreography(small) as c:
        document, encoded = c.prefill(tokens), oracle.encode(tokens)
        headers = [random_tokens(rng, n) for n in (3, 40, 7, 9)]
        parts = [(0, 300), (90, 140), (0, 300), (30, 60)]
        answers = c.decode(
            [
                {"header": h, "parents": [(document, *part)], "sampling_params": _params(30)}
                for h, part in zip(headers, parts, strict=True)
            ]
        )
        for answer, (start, stop) in zip(answers, parts, strict=True):
            assert_greedy(answer, oracle, [Parent(encoded, 0, start, stop)], stop - start)
    invariants.check_nothing_is_left(_scheduler(small))


def test_an_answer_cut_by_its_client_is_read_behind_the_cut(llm: Any, oracle: Oracle) -> None:
    with Choreography(llm) as c:
        header = random_tokens(random.Random(10), 100)
        whole_answer = c.decode(header, sampling_params=_params(40))
        word = f"t{whole_answer.generated_token_ids[20]}"
        cut = c.decode(header, sampling_params=_params(40, stop=[word]))
        assert len(cut.generated_token_ids) <= 21
        answer = c.decode([9, 8], parents=[cut], sampling_params=_params())
        encoded = oracle.encode(cut.token_ids)
        assert_greedy(answer, oracle, [whole(encoded, 0)], cut.num_tokens)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("window", "has_groups", "num_bytes"),
    [(512, False, 6_144_000), (512, True, 1_720_320), (1024, True, 2_375_680)],
)
def test_memory_of_a_long_message_is_that_counted_by_hand(
    window: int,
    has_groups: bool,
    num_bytes: int,
    engine_slot: Slot,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A message of 4,000 tokens in a model like Gemma 3: 5 windows of 6 layers."""
    import transformers

    layer_types = [*["sliding_attention"] * 5, "full_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=layer_types,
        sliding_window=window,
        max_position_embeddings=8192,
    )
    path = make_tiny_model("gemma3_long", tmp_path_factory.mktemp("long"), config=config)
    options = {"max_model_len": 8192, "num_gpu_blocks_override": 2001, **(ON if has_groups else {})}
    engine = engine_slot(path, **options)
    of_a_layer = 32 * 2 * 32 * 4  # bytes of a block: 32 tokens, a key and a value of 32 floats
    full, near = 125, {512: 17, 1024: 33}[window]  # 4,000 / 32; (window - 1) / 32 up, and one
    with Choreography(engine) as c:
        c.prefill([3 + i % 500 for i in range(4000)])
        stats = c.stats()
        if has_groups:
            assert stats["windows"].count(window) == 5 and len(stats["windows"]) == 6
            (message,) = stats["messages"]
            assert sorted(message["num_blocks_by_group"]) == [near] * 5 + [full]
            assert f"{num_bytes:,} bytes" in block_map(stats)
            assert (stats["num_blocks"], stats["num_window_blocks"]) == (full + 5 * near, 5 * near)
            assert stats["block_bytes"] == of_a_layer
            expected = (full + 5 * near) * of_a_layer
        else:
            assert stats["num_blocks"] == full and stats["block_bytes"] == 6 * of_a_layer
            expected = full * 6 * of_a_layer
        assert stats["num_blocks"] * stats["block_bytes"] == expected == num_bytes


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "options", "settings"),
    [
        ("reposition", {}, {"reposition": "in_place"}),
        ("disable_hybrid_kv_cache_manager", {"disable_hybrid_kv_cache_manager": True}, {}),
    ],
)
def test_what_does_not_work_beside_groups_is_refused_at_the_start(
    parameter: str, options: dict[str, Any], settings: dict[str, Any], tiny_model_path: Paths
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    choreo = {"window_groups": True, **settings}
    arguments = EngineArgs(
        str(tiny_model_path("gemma3")), additional_config={"choreo": choreo}, **options
    )
    with pytest.raises(ValueError, match=f"window_groups.*{parameter}"):
        arguments.create_engine_config()

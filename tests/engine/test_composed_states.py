# SPDX-License-Identifier: Apache-2.0
"""Models with states that read messages in any order, against the oracle that composes states."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer

from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    Draw,
    check,
    draw_choreography,
    side_by_side,
)
from tests.engine.feature_machine import invariants
from tests.engine.hybrid import LITTLE_ROOM, MODELS, scheduler_of, small_engine
from tests.engine.oracle import random_tokens, whole
from tests.engine.state_oracle import StateOracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.worker.composed_layers import transition_bytes
from vllm_choreo.engine.worker.composition_probe import probe_composition
from vllm_choreo.errors import ChainError, LimitError, UnsupportedModelError
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.laws import difference, greedy
from vllm_choreo.testing.models.tiny import make_tiny_model

_SEEDS = [range(2), *(range(first, first + 10) for first in range(2, 102, 10))]
_SMALL_SEEDS = [range(200, 202), *(range(first, first + 7) for first in range(202, 300, 7))]


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> StateOracle:
    return StateOracle(tiny_model_path(name))


@pytest.fixture
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    choreo = {"composed_states": True, "tokens_per_state": 128}
    return engine_slot(tiny_model_path(name), additional_config={"choreo": choreo})


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_choreographies(llm: Any, oracle: StateOracle, seeds: range) -> None:
    """Any order, duplicates, gaps and negative distances, behind generated messages, too."""
    with Choreography(llm) as choreography:
        drawn = [draw_choreography(seed, Draw(has_parts=False)) for seed in seeds]
        check(choreography, oracle, side_by_side(drawn))


def test_laws(llm: Any) -> None:
    """Eviction, isolation and split. A permutation is another text to a state, and no law."""
    rng = random.Random(0)
    with Choreography(llm) as c:
        a, b = c.prefill([{"tokens": random_tokens(rng, n)} for n in (40, 33)])
        word = c.prefill(random_tokens(rng, 1), parents=[b], new_offset=90)
        headers = [random_tokens(rng, n) for n in (5, 1, 40)]
        orders = [[b, word, a], [word, b], [a, a, word]]
        calls = [{"header": h, "parents": o} for h, o in zip(headers, orders, strict=True)]
        together = c.decode(calls, sampling_params=greedy())
        assert not any(answer.usage.exact for answer in together)
        assert together[0].usage.encoded_tokens == 5 + 4
        c.evict(a, b, word)
        for call, answer in zip(calls, together, strict=True):
            again = c.decode(call["header"], parents=call["parents"], sampling_params=greedy())
            assert difference(answer, again) < LOGPROB_TOLERANCE
        x, y, parents = random_tokens(rng, 20), random_tokens(rng, 9), [b, a]
        one = c.decode([*x, *y], parents=parents, sampling_params=greedy())
        behind = c.prefill(x, parents=parents)
        other = c.decode(y, parents=[*parents, behind], sampling_params=greedy())
        assert difference(one, other) < LOGPROB_TOLERANCE
        # What was composed once is gone on from: the state behind all of them is stored.
        assert other.usage.exact is False


def test_another_session_shares_what_a_message_does(llm: Any) -> None:
    rng = random.Random(4)
    tokens, others, header = (random_tokens(rng, n) for n in (70, 20, 5))
    with Choreography(llm) as first, Choreography(llm) as second:
        read = [first.prefill(others), first.prefill(tokens)]
        expected = first.decode(header, parents=read[::-1], sampling_params=greedy())
        shared = [second.prefill(others), second.prefill(tokens)]
        assert [message.usage.encoded_tokens for message in shared] == [0, 0]
        first.free(*read)
        found = second.decode(header, parents=shared[::-1], sampling_params=greedy())
        assert difference(expected, found) < LOGPROB_TOLERANCE


def test_parts_are_refused(llm: Any) -> None:
    rng = random.Random(2)
    with Choreography(llm) as c:
        a, b = c.prefill(random_tokens(rng, 40)), c.prefill(random_tokens(rng, 33))
        with pytest.raises(ChainError, match=r"only a part of parent 2 is named.*name all of it"):
            c.prefill(random_tokens(rng, 5), parents=[b, (a, 0, 7)])
        part = c.prefill(random_tokens(rng, 5), parents=[b, (a, 0, 7)], mode="exact")
        assert part.usage.exact


def test_layers_of_other_kinds_are_refused_by_name() -> None:
    layer = MambaMixer.__new__(MambaMixer)
    with pytest.raises(UnsupportedModelError, match=r"layer it \(MambaMixer\).*composed_states"):
        transition_bytes("it", layer)


def test_states_that_were_followed_wrongly_are_refused_at_the_start(
    llm: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs once more, with one layer that forgets what it has noted of the last step."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner
    states = runner.states
    layer = next((one for one in states.composed if one.kept), None)
    if layer is None:
        assert name == "lfm2"  # a convolution notes nothing
        return

    def probe() -> dict[str, float]:
        return probe_composition(
            *(runner.get_model(), runner.vllm_config, list(runner.layers), runner.device),
            *(runner._use_adapter, states),
        )

    assert max(probe().values()) < 1e-5
    follow = layer.follow
    monkeypatch.setattr(
        layer, "follow", lambda tokens: follow(replace(tokens, stops=tokens.starts))
    )
    with pytest.raises(UnsupportedModelError, match=rf"state of layer {layer.name} is not what"):
        probe()


# -- little room -------------------------------------------------------------------------------


@pytest.fixture(params=sampled([True, False], 1), ids=["async", ""])
def small(
    request: pytest.FixtureRequest,
    name: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
) -> Any:
    """Engine of 24 blocks and 5 states; long prompts run in parts, keys are moved.

    The other one has host memory, too.
    """
    is_async = request.param
    choreo: dict[str, Any] = {"composed_states": True, "tokens_per_state": 160}
    options: dict[str, Any] = {}
    if is_async:
        options |= {"max_num_batched_tokens": 48, "scheduling_policy": "priority"}
        choreo["reposition"] = "in_place"
    else:
        choreo["host_memory_gib"] = 0.02
    return small_engine(engine_slot, tiny_model_path(name), choreo, is_async=is_async, **options)


@pytest.mark.parametrize("seeds", sampled(_SMALL_SEEDS, 1), ids=str)
def test_choreographies_with_little_room(small: Any, oracle: StateOracle, seeds: range) -> None:
    """Encodings lose blocks and states, states alone, and get both back."""
    draw, totals = Draw(has_parts=False, max_parents=2, max_offset=300), Counter[str]()
    for seed in seeds:
        with Choreography(small) as choreography:
            check(choreography, oracle, draw_choreography(seed, draw))
            invariants.check(scheduler_of(small))
            totals.update(scheduler_of(small).store.totals)
        invariants.check_nothing_is_left(scheduler_of(small))
    assert totals["evicted_states"]
    assert totals["encoded_again_messages"] or totals["restored_states"]


def test_a_call_that_needs_more_states_than_there_are_is_refused(small: Any) -> None:
    rng = random.Random(3)
    with Choreography(small) as c:
        num_states = c.stats()["num_states"]
        many = [c.prefill(random_tokens(rng, 1)) for _ in range(num_states)]
        with pytest.raises(LimitError, match=r"states at a time.*tokens_per_state") as error:
            c.prefill(random_tokens(rng, 5), parents=many)
        assert error.value.parameter == "parents"
        # One fewer, each of which is encoded again for it if need be.
        found = c.prefill(random_tokens(rng, 5), parents=many[1:])
        assert found.usage.reused_tokens == num_states - 1
    invariants.check_nothing_is_left(scheduler_of(small))


def test_calls_that_wait_do_not_take_states_from_one_another(
    small: Any, oracle: StateOracle
) -> None:
    """Four at once begin with two states each, which were left behind two more, and fit alone.

    The first was refused where later ones took from it what it had had encoded again.
    """
    draw = Draw(has_parts=False, max_parents=2, max_offset=300)
    with Choreography(small) as choreography:
        check(choreography, oracle, draw_choreography(286, draw))
    invariants.check_nothing_is_left(scheduler_of(small))


@pytest.mark.exhaustive
def test_chains_are_those_of_engines_that_read_chains_alone(
    name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """To the last bit: where a chain begins, nothing is composed."""
    found = []
    for is_composed in (False, True):
        choreo = {"composed_states": is_composed, "tokens_per_state": 128}
        llm = engine_slot(tiny_model_path(name), additional_config={"choreo": choreo})
        rng = random.Random(5)
        with Choreography(llm) as c:
            chain: list[Message] = []
            for length in (7, 1, 33, 70):
                chain.append(c.prefill(random_tokens(rng, length), parents=chain))
                header = random_tokens(rng, 4)
                chain.append(c.decode(header, parents=chain, sampling_params=greedy()))
            found.append([m.logprobs for m in chain if m.logprobs])
    assert found[0] == found[1]


# -- in bfloat16 -------------------------------------------------------------------------------


def _squares(rows: torch.Tensor, tokens: Any, logprobs: Any) -> list[float]:
    """Squares of the differences of reported log-probabilities; rows begin with the first."""
    return [
        (entry.logprob - float(row[token])) ** 2
        for row, _, entries in zip(rows, tokens, logprobs, strict=False)
        for token, entry in entries.items()
    ]


def _messages(
    c: Choreography, oracle: StateOracle, rng: random.Random, is_evicting: bool
) -> tuple[list[Message], list[Any]]:
    """Five messages, each behind up to two of those before it, at random places."""
    made: list[Message] = []
    encoded: list[Any] = []
    for index in range(5):
        read = rng.sample(range(index), min(index, rng.choice((0, 1, 2))))
        at, tokens = rng.randrange(200), random_tokens(rng, rng.choice((1, 7, 33, 90)))
        offsets = [rng.randrange(200) for _ in read]
        places = {"parents": [made[n] for n in read], "offsets": offsets, "new_offset": at}
        if index == 4 or rng.random() < 0.3:
            made.append(c.decode(tokens, sampling_params=greedy(6), **places))
        else:
            made.append(c.prefill(tokens, **places))
        seen = [whole(encoded[n], offset) for n, offset in zip(read, offsets, strict=True)]
        encoded.append(oracle.encode(made[-1].token_ids, seen, at))
        if is_evicting and rng.random() < 0.3:
            c.evict(rng.choice(made))
    return made, encoded


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_small", [False, True], ids=["", "small"])
def test_delta_rule_is_as_near_to_float32_as_ordinary_requests(
    engine_slot: Callable[..., Any], tmp_path: Path, is_small: bool
) -> None:
    """vLLM runs gated delta rules on CPU in bfloat16 alone, so both are judged by one float32.

    In a small pool messages lose blocks and states, and states alone.
    """
    path = make_tiny_model("qwen3_next", tmp_path, dtype=torch.bfloat16)
    choreo = {"composed_states": True, "tokens_per_state": 128}
    room = LITTLE_ROOM if is_small else {}
    llm = engine_slot(path, dtype="bfloat16", additional_config={"choreo": choreo}, **room)
    oracle, rng = StateOracle(path), random.Random(0)
    composed: list[float] = []
    ordinary: list[float] = []
    with Choreography(llm) as c:
        for _ in range(104):
            made, encoded = _messages(c, oracle, rng, is_small)
            header = random_tokens(rng, 3)
            answer = c.decode(header, parents=made[::-1], sampling_params=greedy(6))
            offset, seen = 0, []
            for one in encoded[::-1]:
                seen.append(whole(one, offset))
                offset += len(one)
            rows = oracle.encode(answer.token_ids, seen, offset).logprobs()[len(header) - 1 :]
            composed += _squares(rows, answer.generated_token_ids, answer.logprobs)
            text = [*(token for one in made[::-1] for token in one.token_ids), *header]
            (output,) = llm.generate([{"prompt_token_ids": text}], greedy(6), use_tqdm=False)
            said = output.outputs[0]
            rows = oracle.plain_logits([*text, *said.token_ids]).log_softmax(-1)[len(text) - 1 :]
            ordinary += _squares(rows, said.token_ids, said.logprobs)
            invariants.check(scheduler_of(llm))
    totals = scheduler_of(llm).store.totals
    assert bool(totals["encoded_again_messages"] and totals["evicted_states"]) == is_small
    far = (sum(composed) / len(composed)) ** 0.5 / (sum(ordinary) / len(ordinary)) ** 0.5
    assert far < 1.15, far

# SPDX-License-Identifier: Apache-2.0
"""Repair at the seams of models with states, against the oracle that composes states."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.feature_machine import invariants
from tests.engine.hybrid import MODELS, scheduler_of
from tests.engine.oracle import random_tokens, whole
from tests.engine.state_oracle import StateEncoded, StateOracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import ChainError, RepairError
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.laws import difference, greedy


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> StateOracle:
    return StateOracle(tiny_model_path(name))


def _engine(engine_slot: Any, path: Path, **options: Any) -> Any:
    choreo = {"composed_states": True, **options.pop("choreo", {})}
    options |= {"additional_config": {"choreo": choreo}}
    return engine_slot(path, **options)


@pytest.fixture
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return _engine(engine_slot, tiny_model_path(name), choreo={"tokens_per_state": 64})


@pytest.fixture
def small(
    name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Any:
    """Engine of 30 blocks and 9 states, in which long prompts run in parts."""
    options = {
        "num_gpu_blocks_override": 31,
        "max_model_len": 30 * 32,
        "max_num_batched_tokens": 48,
        "choreo": {"tokens_per_state": 100, "host_memory_gib": 0.02},
    }
    return _engine(engine_slot, tiny_model_path(name), **options)


@dataclass
class Program:
    """Random calls, most of which repair first tokens of what they read."""

    rng: random.Random
    oracle: StateOracle
    made: list[tuple[Message, StateEncoded]] = field(default_factory=list)
    num_repaired: int = 0

    def step(self, c: Choreography) -> None:
        rng, tokens = self.rng, random_tokens(self.rng, self.rng.choice((1, 4, 33, 50)))
        chosen = rng.choices(self.made, k=rng.randrange(min(len(self.made), 3) + 1))
        read = [message for message, _ in chosen]
        counts = [rng.choice((0, 1, 5, 32, 40)) for _ in read]
        options: dict[str, Any] = {"parents": read}
        is_by_rule = rng.random() < 0.3
        if is_by_rule:
            counts = [max(counts, default=0)] * len(read)
        ends = [min(n, message.num_tokens) for n, message in zip(counts, read, strict=True)]
        runs = [((0, end),) if end else () for end in ends]
        if is_by_rule and any(counts):
            options["repair"] = f"first:{counts[0]}"
        elif any(runs):
            options["repair"] = tuple(runs)
        offsets, new_offset = self._offsets(read)
        if rng.random() < 0.5:
            offsets = [offset + rng.choice((0, 7)) for offset in offsets]
            new_offset += 20
            options |= {"offsets": offsets, "new_offset": new_offset}
        listed = [whole(one, offset) for (_, one), offset in zip(chosen, offsets, strict=True)]
        context = self.oracle.repair(listed, runs)
        if rng.random() < 0.4:
            message = c.prefill(tokens, **options)
            encoded = self.oracle.encode(tokens, context, new_offset)
        else:
            message = c.decode(tokens, sampling_params=greedy(rng.randrange(1, 9)), **options)
            encoded = self.oracle.encode(message.token_ids, context, new_offset)
            check_tokens(message, encoded, len(tokens), LOGPROB_TOLERANCE, TIE_MARGIN)
        self.num_repaired += message.usage.repaired_tokens
        self.made.append((message, encoded))

    def _offsets(self, read: Sequence[Message]) -> tuple[list[int], int]:
        ends = [0]
        for message in read:
            ends.append(ends[-1] + message.num_tokens)
        return ends[:-1], ends[-1]


_SEEDS = [range(2), *(range(first, first + 7) for first in range(2, 107, 7))]
_SMALL_SEEDS = [range(300, 302), *(range(first, first + 5) for first in range(302, 322, 5))]


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_repairs(llm: Any, oracle: StateOracle, seeds: range) -> None:
    _run(llm, oracle, seeds)


@pytest.mark.parametrize("seeds", sampled(_SMALL_SEEDS, 1), ids=str)
def test_random_repairs_with_little_room(small: Any, oracle: StateOracle, seeds: range) -> None:
    """Copies of first tokens and of rests are evicted, and made again or brought back."""
    _run(small, oracle, seeds)


def _run(llm: Any, oracle: StateOracle, seeds: range) -> None:
    num_repaired = 0
    for seed in seeds:
        program = Program(random.Random(seed), oracle)
        with Choreography(llm) as c:
            for _ in range(8):
                program.step(c)
                invariants.check(scheduler_of(llm))
        num_repaired += program.num_repaired
        invariants.check_nothing_is_left(scheduler_of(llm))
    assert num_repaired


def test_what_is_cut_by_hand_gives_the_same(llm: Any) -> None:
    """Messages cut at the seam: the first tokens encoded behind others, the rest where it was."""
    rng = random.Random(3)
    before, first, rest, header = (random_tokens(rng, n) for n in (40, 32, 50, 5))
    with Choreography(llm) as c:
        other, message = c.prefill(before), c.prefill([*first, *rest])
        answer = c.decode(
            header, parents=[other, message], repair="first:32", sampling_params=greedy()
        )
        as_it_was = c.prefill(first)
        tail = c.prefill(rest, parents=[as_it_was])
        anew = c.prefill(first, parents=[other])
        by_hand = c.decode(header, parents=[other, anew, tail], sampling_params=greedy())
        assert difference(answer, by_hand) < LOGPROB_TOLERANCE
        usage = answer.usage
        assert (usage.repaired_tokens, usage.exact) == (32, False)
        # 32 of them anew, and the message once more, in two parts.
        assert (usage.reused_tokens, usage.encoded_tokens) == (40, 32 + 82 + 5 + 4)
        again = c.decode(
            random_tokens(rng, 3),
            parents=[other, message],
            repair="first:32",
            sampling_params=greedy(),
        )
        assert (again.usage.reused_tokens, again.usage.encoded_tokens) == (122, 3 + 4)
        last = c.decode(header, parents=[message], repair="first:32", sampling_params=greedy())
        assert last.usage.exact and not last.usage.repaired_tokens


def test_what_cannot_be_repaired_is_named(llm: Any) -> None:
    rng = random.Random(2)
    with Choreography(llm) as c:
        a, b = c.prefill(random_tokens(rng, 40)), c.prefill(random_tokens(rng, 33))
        new = random_tokens(rng, 5)
        for repair in (((), ((3, 9),)), ((), ((0, 4), (8, 9)))):
            with pytest.raises(RepairError, match=r"of parent 2 other tokens than the first"):
                c.prefill(new, parents=[a, b], repair=repair)
        for repair in ({"reweight": [1.0, 0.5]}, {"layers": [0, 1]}):
            with pytest.raises(RepairError, match=r"keeps a state.*'first:32'.*exact"):
                c.prefill(new, parents=[a, b], repair=repair)
        with pytest.raises(ChainError, match="only a part of parent 2"):
            c.prefill(new, parents=[a, (b, 0, 9)], repair="first:3")
        assert c.prefill(new, parents=[b, a], repair="first:3").usage.repaired_tokens == 3

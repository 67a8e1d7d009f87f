# SPDX-License-Identifier: Apache-2.0
"""Calls that attend to their parents by other weights, against the dense oracle's own attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY, Program
from tests.engine.weighed_oracle import WeighedOracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import RepairError


def _documents(c: Choreography, seed: int, count: int = 3) -> list[Any]:
    rng = random.Random(seed)
    return [c.prefill(random_tokens(rng, 70)) for _ in range(count)]


def _logprobs(message: Any) -> list[dict[int, float]]:
    return [{t: entry.logprob for t, entry in step.items()} for step in message.logprobs]


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


def test_weights_of_one_change_nothing(c: Choreography) -> None:
    docs = _documents(c, 1)
    plain = c.decode([5, 6], parents=docs, sampling_params=GREEDY)
    same = c.decode([5, 6], parents=docs, repair={"reweight": [1, 1]}, sampling_params=GREEDY)
    assert same.usage.repaired_tokens == 0
    for found, expected in zip(_logprobs(same), _logprobs(plain), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    other = c.decode([5, 6], parents=docs, repair={"reweight": [0.7, 1]}, sampling_params=GREEDY)
    assert _logprobs(other)[0] != pytest.approx(_logprobs(plain)[0], abs=1e-3)


def test_a_first_parent_counts_as_it_is(c: Choreography) -> None:
    docs = _documents(c, 2, 1)
    call = {"parents": docs, "sampling_params": GREEDY}
    c.decode([5, 6], **call)
    plain = c.decode([5, 6], **call)
    same = c.decode([5, 6], repair={"reweight": [0.5, 2]}, **call)
    assert _logprobs(same) == _logprobs(plain) and same.usage == plain.usage


def test_what_was_encoded_by_other_weights_is_shared_with_its_like_alone(c: Choreography) -> None:
    docs = _documents(c, 3)
    calls = [{"repair": rule} for rule in (None, {"reweight": [0.9, 1]}, {"reweight": [0.8, 1]})]
    found = [c.prefill([9] * 40, parents=docs, **call) for call in calls * 2]
    assert [message.usage.encoded_tokens for message in found] == [40, 40, 40, 8, 8, 8]
    assert not found[1].usage.exact
    # It is not what its parents' reader would encode: mode exact makes it anew.
    exact = c.prefill([3], parents=[*docs, found[1]], mode="exact")
    assert exact.usage.exact and exact.usage.encoded_tokens == 2 * 70 + 40 + 1


def test_it_is_made_again_as_it_was(c: Choreography) -> None:
    docs = _documents(c, 4)
    made = c.prefill([9] * 40, parents=docs, repair={"reweight": [0.6, 1.2]})
    before = c.decode([5], parents=[made], sampling_params=GREEDY)
    c.evict(*docs, made)
    after = c.decode([5], parents=[made], sampling_params=GREEDY)
    for found, expected in zip(_logprobs(after), _logprobs(before), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_it_is_no_rule_of_exact_calls(c: Choreography) -> None:
    with pytest.raises(RepairError, match="mode 'exact'"):
        c.prefill([3], parents=_documents(c, 5), repair={"reweight": [0.9, 1]}, mode="exact")


class WeighedProgram(Program):
    """Calls by random weights."""

    def options(self) -> tuple[dict[str, Any], list[Parent]]:
        spans, parents, offset = self.spans()
        weights = [self.rng.uniform(0.5, 1.5), self.rng.uniform(0.8, 1.2)]
        options = {
            "parents": spans,
            "offsets": [parent.offset for parent in parents],
            "new_offset": offset + self.rng.choice((0, 0, 25)),
            "repair": self.rng.choice(["none", {"reweight": weights}, {"reweight": weights}]),
        }
        return options, parents

    def oracle_of(self, options: dict[str, Any]) -> Any:
        rule = options["repair"]
        return self.oracle if rule == "none" else WeighedOracle(self.oracle, *rule["reweight"])

    def repaired(
        self, options: dict[str, Any], parents: list[Parent], header: list[int]
    ) -> list[Parent]:
        return parents


@pytest.fixture(scope="module", params=sampled(("llama", "gemma3", "qwen3", "glm4"), 3))
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    return engine_slot(tiny_model_path(request.param)), tiny_oracle(request.param)


@pytest.mark.parametrize("seed", sampled(range(25), 2))
def test_random_calls_by_other_weights(tiny: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = tiny
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        program = WeighedProgram(c, oracle, random.Random(seed))
        for number in range(8):
            program.step()
            if number == 5:
                c.evict(*(message for message, _ in program.made))
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free

# SPDX-License-Identifier: Apache-2.0
"""Repaired calls on engines with window groups: results are those of one group that keeps all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.feature_machine import invariants
from tests.engine.oracle import random_tokens
from vllm_choreo import Choreography
from vllm_choreo.engine.utility import call
from vllm_choreo.testing import laws

_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5, max_tokens=6)
_RULES: list[Any] = [
    "first:32",
    "first:8",
    [[], [(174, 190)], [(81, 97)]],
    {"share": 0.2, "by": "random"},
    {"share": 0.2, "by": "attention"},
    {"reweight": [0.8, 1.2]},
    [[], [(70, 90), (100, 103)], [(0, 64)]],
    {"layers": [1, 3]},
    {"layers": [0, 2]},
    {"layers": [[0, 1], [2, 3]]},
    "all",
]
# One after the other; with gaps; and where layers with windows see the middle of some.
_OFFSETS: list[Any] = [None, [0, 300, 600], [0, 100, 40]]

Slot = Callable[..., Any]


class _Answer(NamedTuple):
    message: Any
    num_again: int


def _run(llm: Any, rules: list[Any]) -> list[_Answer]:
    """Answers of calls one by one, each with the messages that were encoded again by then."""
    rng, answers = random.Random(21), list[_Answer]()
    texts = [random_tokens(rng, n) for n in (150, 190, 97)]
    for offsets in _OFFSETS:
        with Choreography(llm) as c:
            docs = [c.prefill(text, keep_hidden=[1, 2]) for text in texts]
            for rule in rules:
                before = int(call(llm, "totals").get("encoded_again_messages_total", 0))
                message = c.decode(
                    [5, 6, 7],
                    parents=docs,
                    offsets=offsets,
                    repair=rule,
                    sampling_params=_PARAMS,
                )
                after = int(call(llm, "totals").get("encoded_again_messages_total", 0))
                answers.append(_Answer(message, after - before))
    invariants.check_nothing_is_left(llm.llm_engine.engine_core.engine_core.scheduler)
    return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gemma3", "gpt_oss"])
def test_repaired_calls_are_those_of_one_group(
    model: str, engine_slot: Slot, tiny_model_path: Callable[[str], Path]
) -> None:
    settings = {"hidden_memory_gib": 2**-7}
    found = [
        _run(engine_slot(tiny_model_path(model), additional_config={"choreo": choreo}), _RULES)
        for choreo in (settings, {**settings, "window_groups": True})
    ]
    num_same = 0
    for index, (one, grouped) in enumerate(zip(*found, strict=True)):
        where = _OFFSETS[index // len(_RULES)], _RULES[index % len(_RULES)]
        assert grouped.message.usage == one.message.usage, where
        difference = laws.difference(one.message, grouped.message)
        assert difference < LOGPROB_TOLERANCE, where
        num_same += one.message.logprobs == grouped.message.logprobs
    # To the last bit until something is encoded again, then to rounding.
    assert num_same and any(answer.num_again for answer in found[1])

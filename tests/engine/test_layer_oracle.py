# SPDX-License-Identifier: Apache-2.0
"""The oracle of repair by layers against that of repair: how far can it be trusted? No engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Oracle, Parent, random_tokens, whole

# As in `test_oracle_self.py`: two float32 evaluations of the same thing in another order.
_TOLERANCE = 5e-5


@pytest.fixture(scope="module", params=["llama", "qwen3", "glm4", "bloom"])
def layered(request: pytest.FixtureRequest, tiny_oracle: Callable[[str], Oracle]) -> LayerOracle:
    return LayerOracle(tiny_oracle(request.param))


def _parents(layered: LayerOracle) -> list[Parent]:
    """Three messages that know nothing of one another, one of them in part."""
    rng = random.Random(3)
    made = [layered.encode(random_tokens(rng, 20)) for _ in range(3)]
    return [whole(made[0], 0), Parent(made[1], 20, 4, 17), whole(made[2], 40)]


def _reading(layered: LayerOracle, parents: Sequence[Parent]) -> torch.Tensor:
    return layered.oracle.encode([5, 6, 7], parents, 60).logprobs()


def test_all_layers_are_a_repair_of_all_tokens(layered: LayerOracle) -> None:
    parents = _parents(layered)
    everything = layered.oracle.repair(parents, [[(0, p.stop - p.start)] for p in parents])
    by_layers = layered.repair(parents, [range(layered.oracle.num_layers)])
    expected = _reading(layered, everything)
    torch.testing.assert_close(_reading(layered, by_layers), expected, atol=_TOLERANCE, rtol=0)


def test_each_range_says_something_else(layered: LayerOracle) -> None:
    """Or a mistake in the layers would not be seen. What the first layer of a range stores depends
    on its hidden states alone: one layer repairs nothing.
    """
    parents = _parents(layered)
    ends = range(layered.oracle.num_layers + 1)
    ranges = [(lo, hi) for hi in ends for lo in range(hi)]
    stored = _reading(layered, parents)
    found = {
        layers: _reading(layered, layered.repair(parents, [range(*layers)])) for layers in ranges
    }
    for layers, one in found.items():
        if layers[1] - layers[0] == 1:
            torch.testing.assert_close(one, stored, atol=_TOLERANCE, rtol=0)
            continue
        others = [other for name, other in found.items() if name[1] - name[0] > 1 and name < layers]
        for other in [stored, *others]:
            assert (one - other).abs().max() > 100 * _TOLERANCE


def test_what_was_encoded_in_this_context_stays_as_it_is(layered: LayerOracle) -> None:
    first = layered.encode(random_tokens(random.Random(4), 20))
    second = layered.encode(random_tokens(random.Random(5), 20), [whole(first, 0)], 20)
    parents = [whole(first, 0), whole(second, 20)]
    for layers in ([range(1, 2)], [range(1, 3)], [range(2, 3)], [range(1), range(2, 3)]):
        for stored, anew in zip(parents, layered.repair(parents, layers), strict=True):
            for one, other in zip(stored.message.keys, anew.message.keys, strict=True):
                torch.testing.assert_close(one, other, atol=_TOLERANCE, rtol=0)

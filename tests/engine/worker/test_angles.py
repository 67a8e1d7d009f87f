# SPDX-License-Identifier: Apache-2.0
"""Angles that are kept are those of the rotation, to the bit."""

import random

import pytest
import torch

from vllm_choreo.engine.worker import angles as module
from vllm_choreo.engine.worker.angles import Angles
from vllm_choreo.ops import Rotation


@pytest.mark.parametrize("most", [7, 40, 16 * 1024])
def test_angles_are_those_of_the_rotation(most, monkeypatch):
    """Also where there are more distances than are kept, in a step or in all of them."""
    monkeypatch.setattr(module, "_MOST", most)
    rotation = Rotation(torch.rand(5, dtype=torch.float64), is_neox=True)
    rng, kept = random.Random(1), Angles(rotation, torch.device("cpu"))
    for _ in range(30):
        wanted = [rng.randrange(-30, 30) * 1001 for _ in range(rng.choice([0, 1, 5, 12]))]
        deltas = torch.tensor(wanted, dtype=torch.int32)
        assert torch.equal(kept.of(deltas), rotation.cos_sin(deltas))


def test_what_was_given_is_not_written_again():
    kept = Angles(Rotation(torch.ones(2, dtype=torch.float64), True), torch.device("cpu"))
    first = kept.of(torch.tensor([3], dtype=torch.int32))
    before = first.clone()
    kept.of(torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    assert torch.equal(first, before)

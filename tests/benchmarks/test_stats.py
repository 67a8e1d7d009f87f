# SPDX-License-Identifier: Apache-2.0
"""Intervals of ratios of pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.harness.stats import paired_ratio_interval
from vllm_choreo.lab.study.stats import bootstrap_interval


def test_pairs_stay_together() -> None:
    """What differs between pairs and not within them does not blur the ratio."""
    below = [1.0, 10.0, 100.0, 1000.0, 3.0, 30.0, 300.0]
    assert paired_ratio_interval([3 * x for x in below], below) == pytest.approx((3.0, 3.0))
    low, high = paired_ratio_interval(below, [1.0] * 7)
    assert (low, high) == bootstrap_interval(below)


def test_a_ratio_covers_the_ratio_of_medians() -> None:
    rng = np.random.default_rng(6)
    covered = 0
    for i in range(150):
        size = rng.lognormal(0.0, 0.5, size=30)
        above, below = (size * rng.lognormal(m, 0.2, size=30) for m in (math.log(4), 0.0))
        low, high = paired_ratio_interval(above, below, seed=i, resamples=300)
        covered += low <= 4.0 <= high
    # The percentile bootstrap of medians is a little wide; three standard errors of 150 are 0.05.
    assert covered / 150 >= 0.90


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 numerators, 1 denominators"):
        paired_ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio_interval([1.0], [0.0])

# SPDX-License-Identifier: Apache-2.0
"""Intervals: against exact distributions, published values, and their coverage."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from vllm_choreo.lab.study.stats import bootstrap_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(
    successes: int, n: int, low: float, high: float
) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_has_its_level_as_coverage_on_average() -> None:
    n = 60
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    covered = []
    for share in np.linspace(0.02, 0.98, 97):
        hits = [k for k, (low, high) in enumerate(intervals) if low <= share <= high]
        covered.append(sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in hits))
    assert statistics.mean(covered) == pytest.approx(0.95, abs=0.01)


def test_wilson_of_nothing_says_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_bootstrap_of_a_median_has_the_exact_ranks() -> None:
    """A resampled median is at most the k-th value if half of the draws are; that is binomial."""
    n = 25
    at_most = [
        sum(math.comb(n, j) * (k / n) ** j * (1 - k / n) ** (n - j) for j in range(13, n + 1))
        for k in range(n + 1)
    ]
    low = next(k for k, share in enumerate(at_most) if share >= 0.025)
    high = next(k for k, share in enumerate(at_most) if share >= 0.975)
    values = [k**2 / 7 for k in range(1, n + 1)]
    for seed in (0, 1, 2):
        assert bootstrap_interval(values, seed=seed) == (low**2 / 7, high**2 / 7)


def test_the_bootstrap_of_a_mean_covers_the_mean() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for i in range(200):
        values = rng.normal(3.0, 2.0, size=40).tolist()
        low, high = bootstrap_interval(values, statistics.fmean, seed=i, resamples=400)
        covered += low <= 3.0 <= high
    # 0.94 is expected of 40 values; three standard errors of 200 trials are 0.05.
    assert 0.89 <= covered / 200 <= 0.99


def test_the_seed_alone_decides() -> None:
    values = [1.0, 4.0, 9.0, 2.0, 8.0, 3.0]
    mean = statistics.fmean
    assert bootstrap_interval(values, mean, seed=3) == bootstrap_interval(values, mean, seed=3)
    assert bootstrap_interval(values, mean, seed=3) != bootstrap_interval(values, mean, seed=4)


def test_a_wider_level_gives_a_wider_interval() -> None:
    values = list(range(30))
    narrow, wide = (bootstrap_interval(values, level=level) for level in (0.5, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one value"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=95)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="level"):
        wilson_interval(1, 2, level=1.0)

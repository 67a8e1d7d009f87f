# SPDX-License-Identifier: Apache-2.0
"""Intervals of a statistic and of a proportion, and McNemar's exact test of two paired ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

LEVEL = 0.95
RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[Any],
    statistic: Callable[[list[Any]], float] = statistics.median,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic (Efron & Tibshirani 1993, chapter 13).

    Args:
        values: independent measurements, in any unit, or rows of several that were made of the
            same problem; one at least.
        statistic: function of a list of as many values, in the unit of the interval.
        seed: seed of the resampling; the same seed gives the same interval.
        resamples: number of times that `values` is resampled with replacement.
        level: share of the resamples' statistics that lies between the two ends.

    Raises:
        ValueError: there are no values, or `level` does not lie between 0 and 1.
    """
    _check_level(level)
    if not len(values):
        raise ValueError("an interval needs one value at least")
    import numpy as np  # not needed to read what a command takes

    numbers = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    found = [statistic(numbers[rows].tolist()) for rows in drawn]
    ends = ((1 - level) / 2, (1 + level) / 2)
    low, high = (float(np.quantile(found, share)) for share in ends)
    return low, high


def wilson_interval(successes: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); of no trials at all, 0 to 1.

    Raises:
        ValueError: `successes` does not lie between 0 and `n`, or `level` between 0 and 1.
    """
    _check_level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    centre = share + z * z / (2 * n)
    margin = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and at n the interval ends there; rounding must not take it past the end.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    high = 1.0 if successes == n else (centre + margin) / scale
    return low, high


def mcnemar(worse: int, better: int) -> float:
    """P-value of McNemar's exact test (McNemar 1947; Fagerland et al. 2013, the exact form).

    If neither of two ways of answering were better, each problem on which they differ would favour
    the one or the other like a fair coin.

    Args:
        worse, better: number of problems on which the one way is wrong and the other right, and
            the reverse.

    Returns:
        The probability of a split at least as uneven, two-sided.

    Raises:
        ValueError: a number below 0.
    """
    if min(worse, better) < 0:
        raise ValueError(f"{worse} worse, {better} better")
    n, ways, tail = worse + better, 1, 0
    for k in range(min(worse, better) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")

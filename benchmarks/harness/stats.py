# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads, and intervals: of a statistic, a proportion, a ratio of medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def spread(values: Iterable[float]) -> tuple[float, float]:
    """First and third quartile; the extremes where there are fewer than four values."""
    found = sorted(values)
    if len(found) < 4:
        return found[0], found[-1]
    first, _, third = statistics.quantiles(found, n=4)
    return first, third


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all values lies, between two of them if need be."""
    found = sorted(values)
    place = share * (len(found) - 1)
    low = int(place)
    high = min(low + 1, len(found) - 1)
    return found[low] + (place - low) * (found[high] - found[low])


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[list[float]], float] = statistics.median,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic (Efron & Tibshirani 1993, chapter 13).

    Args:
        values: independent measurements, in any unit; one at least.
        statistic: of a list of as many values, in the unit of the interval.
        seed: of the resampling; the same seed gives the same interval.
        resamples: how often `values` is drawn from with replacement.
        level: what part of the resamples' statistics lies between the two ends.

    Raises:
        ValueError: there are no values, or `level` does not lie between 0 and 1.
    """
    drawn = _resampled(len(values), seed, resamples, level)
    numbers = np.asarray(values, dtype=float)
    return _percentiles([statistic(numbers[rows].tolist()) for rows in drawn], level)


def paired_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> tuple[float, float]:
    """The interval of `median(numerators) / median(denominators)`; pairs are drawn together.

    Args:
        numerators, denominators: measurements of the same things, in the same order, above 0.
        seed, resamples, level: as in `bootstrap_interval`.

    Raises:
        ValueError: no pairs, lists of different length, or a denominator that is not above 0.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators, {len(denominators)} denominators")
    if any(value <= 0 for value in denominators):
        raise ValueError("denominators must be above 0")
    drawn = _resampled(len(numerators), seed, resamples, level)
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    ratios = [float(np.median(above[rows]) / np.median(below[rows])) for rows in drawn]
    return _percentiles(ratios, level)


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


def _resampled(n: int, seed: int, resamples: int, level: float) -> list[np.ndarray]:
    """Rows of indices into `n` values, drawn with replacement."""
    _check_level(level)
    if n == 0:
        raise ValueError("an interval needs one value at least")
    return list(np.random.default_rng(seed).integers(n, size=(resamples, n)))


def _percentiles(found: Sequence[float], level: float) -> tuple[float, float]:
    low, high = (float(np.quantile(found, share)) for share in ((1 - level) / 2, (1 + level) / 2))
    return low, high


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")

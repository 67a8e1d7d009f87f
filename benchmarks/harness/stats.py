# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads, and the interval of a ratio of medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from vllm_choreo.lab.study.stats import LEVEL, RESAMPLES, bootstrap_interval


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

    def ratio(pairs: list[tuple[float, float]]) -> float:
        above, below = zip(*pairs, strict=True)
        return statistics.median(above) / statistics.median(below)

    pairs = list(zip(numerators, denominators, strict=True))
    return bootstrap_interval(pairs, ratio, seed, resamples, level)

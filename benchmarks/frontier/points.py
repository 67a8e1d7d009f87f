# SPDX-License-Identifier: Apache-2.0
"""The points of the frontier: rules at budgets, by task, and what they buy against `first:k`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.frontier.rules import ALL, FIRST, NONE
from vllm_choreo.lab.study.stats import bootstrap_interval

Rows = Sequence[Mapping[str, str]]


class Point(NamedTuple):
    """A rule at a budget on a task, of each problem.

    Attributes:
        charged: share of the tokens that are read where they were not encoded.
        kl: KL(text || rule), in nats per token.
    """

    charged: list[float]
    kl: list[float]


Points = dict[tuple[str, float], Point]


def points_of(rows: Rows) -> dict[str, Points]:
    """The points by task, then by rule and budget."""
    found: dict[str, Points] = defaultdict(dict)
    for row in rows:
        key = row["rule"], float(row["budget"])
        point = found[row["task"]].setdefault(key, Point([], []))
        point.charged.append(float(row["charged"]))
        point.kl.append(float(row["kl"]))
    return dict(found)


def against_first(points: Points, key: tuple[str, float]) -> tuple[float, float, float]:
    """KL less that of `first` at the same charge, of the same problems: mean, and its interval.

    What `first` has between its budgets is interpolated; no repair is its smallest one, all its
    largest.
    """
    ends = [(NONE, 0.0), *sorted(k for k in points if k[0] == FIRST), (ALL, 1.0)]
    less = []
    for number, (charged, kl) in enumerate(zip(points[key].charged, points[key].kl, strict=True)):
        places = [points[end].charged[number] for end in ends]
        values = [points[end].kl[number] for end in ends]
        less.append(kl - float(np.interp(charged, places, values)))
    return fmean(less), *bootstrap_interval(less, fmean, resamples=2000)
